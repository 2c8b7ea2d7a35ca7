"""Any torch optimizer over the master shards, one bucket at a time: by elements, or by whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.scratch import ScratchPool
from zerotrain.engine.weights import BucketWeights
from zerotrain.engine.whole_tensors import Updates, WholeTensors
from zerotrain.errors import ConfigError
from zerotrain.sharding.bucketing import ManagedParameter, Unit
from zerotrain.sharding.ownership import assign_owners

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer from parameter groups. It may have a method `needs_whole(units)`, which names the parameters that
are updated whole; their groups are called "whole matrices" and "whole others", and never mixed with the rest."""

NEEDS_EVERYTHING = {
    "LBFGS": "needs all parameters at once",
    "SparseAdam": "needs sparse gradients",
}
"""Optimizers of torch that neither a shard nor a whole tensor is enough for."""

NEEDS_WHOLE_TENSORS = {
    "Adafactor": "factors whole matrices",
    "LAMB": "takes the norms of whole tensors",
    "LARS": "takes the norms of whole tensors",
    "Lamb": "takes the norms of whole tensors",
    "Lars": "takes the norms of whole tensors",
    "Muon": "orthogonalises whole matrices",
    "SOAP": "preconditions whole matrices",
    "Shampoo": "preconditions whole matrices",
}
"""Known by name, whoever has written them."""

WHOLE_TENSOR_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.Muon)
"""Those of torch that update each tensor apart from the others; any other class says `whole_tensor = True`."""

SAMPLE_SHAPE = (64, 64)


def build_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer of groups that are all to be updated whole, or all by elements.

    Raises:
        ConfigError: it is known to need more than it would get, or refuses what it gets.
    """
    whole = groups[0]["name"].startswith("whole ")
    try:
        optimizer = factory(groups)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error
    kind = type(optimizer).__name__
    if kind in NEEDS_EVERYTHING:
        raise ConfigError(f"optimizer={kind}: {NEEDS_EVERYTHING[kind]}, which no rank has; use AdamW, SGD or the like")
    if kind in NEEDS_WHOLE_TENSORS and not (whole and works_on_whole_tensors(optimizer)):
        raise ConfigError(
            f"optimizer={kind}: {NEEDS_WHOLE_TENSORS[kind]}, which a shard does not hold; if it updates each tensor "
            "apart from the others, say `whole_tensor = True` in its class, and ranks will gather tensors for it"
        )
    return optimizer


def works_on_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is declared to update whole tensors, each apart from the others."""
    return isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS) or getattr(optimizer, "whole_tensor", False)


def needing_whole(factory: OptimizerFactory, units: Sequence[Unit]) -> list[ManagedParameter]:
    """The trainable parameters of `units` that the optimizer needs whole: those it names, or all, or none.

    Raises:
        ConfigError: it names none where it must, or cannot work here.
    """
    choose = getattr(factory, "needs_whole", None)
    if choose is not None:
        return list(choose(units))
    trainable = [managed for unit in units for managed in unit.parameters if managed.parameter.requires_grad]
    optimizer = factory([{"params": [torch.zeros(SAMPLE_SHAPE)], "name": "whole matrices"}])
    if not works_on_whole_tensors(optimizer):
        return []
    vector = next((managed.names[0] for managed in trainable if managed.parameter.ndim != 2), None)
    if isinstance(optimizer, torch.optim.Muon) and vector is not None:
        raise ConfigError(
            f"optimizer=Muon: takes matrices alone, and {vector} is none; use optimizer=muon, in Python "
            "zerotrain.MuonWithAdamW(...), which leaves the rest to AdamW"
        )
    return trainable


class ShardedOptimizer:
    """One torch optimizer a bucket, driven by one set of hyperparameters.

    A bucket can be updated as soon as its gradient is there, and its gather issued while the next is updated. What is
    updated whole has a second torch optimizer, for the tensors this rank owns.

    Args:
        pool: of the master dtype.
    """

    param_groups: list[dict[str, Any]]
    """The hyperparameters of all buckets; "name" is matrices (two or more dimensions) or others, behind "whole " for
    what is updated whole."""

    def __init__(
        self,
        factory: OptimizerFactory,
        weights: Sequence[BucketWeights],
        *,
        decay_all: bool,
        collectives: Collectives,
        pool: ScratchPool,
    ) -> None:
        self._factory = factory
        self._decay_all = decay_all
        self._targets: list[list[tuple[slice, torch.Tensor]]] = []
        self._optimizers: list[torch.optim.Optimizer | None] = []
        for each in weights:
            spans = _group_spans(each)
            targets = {name: each.master_weight[span].detach() for name, span in spans.items()}
            self._optimizers.append(self._build({name: [target] for name, target in targets.items()}))
            self._targets.append([(spans[name], target) for name, target in targets.items()])
        shapes = [[slot.shape for slot in each.layout.slots[: each.spec.num_whole]] for each in weights]
        self._whole = [
            WholeTensors(each, dict(enumerate(owners)), collectives=collectives, pool=pool) if owners else None
            for each, owners in zip(weights, assign_owners(shapes, collectives.world.size), strict=True)
        ]
        self._whole_optimizers = [
            self._build_whole(each, whole) for each, whole in zip(weights, self._whole, strict=True)
        ]
        self.param_groups = self._hyperparameters([managed for each in weights for managed in each.spec.parameters])

    def _build(self, groups: dict[str, list[torch.Tensor]]) -> torch.optim.Optimizer | None:
        if not groups:
            return None
        named = [{"params": targets, "name": name} for name, targets in groups.items()]
        optimizer = build_optimizer(self._factory, named)
        for group in optimizer.param_groups:
            if not group["name"].endswith("matrices") and not self._decay_all and "weight_decay" in group:
                group["weight_decay"] = 0.0
        return optimizer

    def _build_whole(self, weights: BucketWeights, whole: WholeTensors | None) -> torch.optim.Optimizer | None:
        groups: dict[str, list[torch.Tensor]] = {}
        for slot, target in whole.targets.items() if whole else ():
            groups.setdefault(weights.spec.parameters[slot].group_name, []).append(target)
        return self._build(groups)

    def _hyperparameters(self, managed: Sequence[ManagedParameter]) -> list[dict[str, Any]]:
        """Of every group of the model, also of one that has nothing on this rank."""
        hyperparameters = []
        for name in sorted({each.group_name for each in managed}):
            sample = _held(self._build({name: [torch.zeros(SAMPLE_SHAPE)]})).param_groups[0]
            hyperparameters.append({key: value for key, value in sample.items() if key != "params"})
            hyperparameters[-1].setdefault("initial_lr", float(sample.get("lr", 0.0)))
        return hyperparameters

    def step(self, index: int, gradient: torch.Tensor) -> Iterator[None]:
        """Update bucket `index`: its elements now, its whole tensors by the iterator returned.

        Args:
            gradient: master dtype, over the bucket's optimizer range; read before this returns.

        Returns:
            The rest of the work, to be resumed at the same points on every rank (see `WholeTensors.update`).
        """
        whole = self._whole[index]
        self._run(self._optimizers[index], [(target, gradient[span]) for span, target in self._targets[index]])
        if whole is None:
            return iter(())
        return whole.update(gradient, partial(self._run, self._whole_optimizers[index]))

    def _run(self, optimizer: torch.optim.Optimizer | None, updates: Updates) -> None:
        if optimizer is None:
            return
        shared = {group["name"]: group for group in self.param_groups}
        for group in optimizer.param_groups:
            group.update(shared[group["name"]])
        for target, gradient in updates:
            target.grad = gradient
        optimizer.step()
        for target, _ in updates:
            target.grad = None

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends in a step so that tensors can be updated whole."""
        return sum(whole.sent_nbytes for whole in self._whole if whole)

    def state_tensors(self) -> list[torch.Tensor]:
        """All state of this rank (0-dim counters left out)."""
        return [each for optimizer in self._optimizers + self._whole_optimizers for each in _state_of(optimizer)]

    def state_nbytes(self, num_elements: int, num_whole: int) -> int:
        """Bytes of state of all ranks together, for so many elements, of which so many are updated whole.

        Measured on what this rank updates by elements; for whole tensors, of which it may own none, on a sample.
        """
        held = sum(each.nbytes for optimizer in self._optimizers for each in _state_of(optimizer))
        updated = sum(target.numel() for targets in self._targets for _, target in targets)
        by_elements = (num_elements - num_whole) * (held // updated if updated else 0)
        if not num_whole:
            return by_elements
        sample = torch.zeros(SAMPLE_SHAPE)
        optimizer = _held(self._build({"whole matrices": [sample]}))
        sample.grad = torch.ones_like(sample)
        optimizer.step()
        return by_elements + num_whole * sum(each.nbytes for each in _state_of(optimizer)) // sample.numel()


def _state_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim > 0]


def _held(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    assert optimizer is not None
    return optimizer


def _group_spans(weights: BucketWeights) -> dict[str, slice]:
    """Where each group that is updated by elements lies in this rank's optimizer range, empty spans left out."""
    borders: dict[str, int] = {}
    for index, managed in enumerate(weights.spec.parameters):
        borders.setdefault(managed.group_name, index)
    spans = weights.layout.spans(list(borders.values()), weights.optimizer_range)
    by_name = zip(borders, spans, strict=True)
    return {name: span for name, span in by_name if span.stop > span.start and not name.startswith("whole ")}
