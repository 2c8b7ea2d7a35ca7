"""Any torch optimizer over the master shards, one bucket at a time: by elements, or by whole tensors."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.optimizer_factory import SAMPLE_SHAPE, build_optimizer
from zerotrain.engine.param_groups import ParamGroups
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPool
from zerotrain.engine.weights import BucketWeights
from zerotrain.engine.whole_tensors import Updates, WholeTensors
from zerotrain.sharding.ownership import assign_owners


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that one rank updates as one tensor: parameters of one group and of the same age."""

    where: slice
    """Within this rank's optimizer range."""
    target: torch.Tensor
    """The master weight there."""
    key: tuple[int, int]
    """`ManagedParameter.span` of its parameters."""


class ShardedOptimizer:
    """One torch optimizer a bucket, driven by one set of hyperparameters.

    A bucket can be updated as soon as its gradient is there, and its gather issued while the next is updated. What is
    updated whole has a second torch optimizer, for the tensors this rank owns.
    """

    spans: list[list[Span]]
    """Of each bucket, what this rank updates by elements."""

    def __init__(
        self, groups: ParamGroups, schedule: Schedule, *, collectives: Collectives, master_pool: ScratchPool
    ) -> None:
        weights = [each for each, _ in schedule.trained]
        self._factory = groups.factory
        self.param_groups = groups.hyperparameters
        self.spans = [_cut_spans(each) for each in weights]
        self._optimizers = [self._build((span.key[0], span.target) for span in spans) for spans in self.spans]
        shapes = [[slot.shape for slot in each.layout.slots[: each.spec.num_whole]] for each in weights]
        self._whole = [
            WholeTensors(each, dict(enumerate(owners)), collectives, master_pool) if owners else None
            for each, owners in zip(weights, assign_owners(shapes, collectives.world.size), strict=True)
        ]
        self._whole_optimizers = [
            self._build((each.spec.parameters[slot].group, target) for slot, target in whole.targets.items())
            if whole
            else None
            for each, whole in zip(weights, self._whole, strict=True)
        ]

    def _build(self, targets: Iterable[tuple[int, torch.Tensor]]) -> torch.optim.Optimizer | None:
        """The optimizer of tensors, each with the number of its group; None for no tensors."""
        groups: dict[int, list[torch.Tensor]] = {}
        for group, target in targets:
            groups.setdefault(group, []).append(target)
        described = [{"params": members, **self.param_groups[group]} for group, members in groups.items()]
        return build_optimizer(self._factory, described) if described else None

    def step(self, index: int, gradient: torch.Tensor) -> Iterator[None]:
        """Update bucket `index`: its elements now, its whole tensors by the iterator returned.

        Args:
            gradient: master dtype, over the bucket's optimizer range; read before this returns.

        Returns:
            The rest of the work, to be resumed at the same points on every rank (see `WholeTensors.update`).
        """
        whole = self._whole[index]
        self._run(self._optimizers[index], [(span.target, gradient[span.where]) for span in self.spans[index]])
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

    def state_of(self, index: int, span: Span) -> dict[str, Any]:
        """What the optimizer of bucket `index` keeps of a span, by name; to be read and written."""
        optimizer = self._optimizers[index]
        assert optimizer is not None  # where there is a span
        return optimizer.state[span.target]

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
        updated = sum(span.target.numel() for spans in self.spans for span in spans)
        by_elements = (num_elements - num_whole) * (held // updated if updated else 0)
        if not num_whole:
            return by_elements
        sample = torch.zeros(SAMPLE_SHAPE)
        optimizer = build_optimizer(self._factory, [{"params": [sample], "name": "whole matrices"}])
        sample.grad = torch.ones_like(sample)
        optimizer.step()
        return by_elements + num_whole * sum(each.nbytes for each in _state_of(optimizer)) // sample.numel()


def _state_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim > 0]


def _cut_spans(weights: BucketWeights) -> list[Span]:
    """The spans of a bucket that lie in this rank's optimizer range, without what is updated whole."""
    members = weights.spec.parameters
    keys = [(managed.is_updated_whole, managed.span) for managed in members]
    borders = [index for index, key in enumerate(keys) if index == 0 or key != keys[index - 1]]
    places = weights.layout.spans(borders, weights.optimizer_range)
    return [
        Span(place, weights.master_weight[place].detach(), members[border].span)
        for border, place in zip(borders, places, strict=True)
        if place.stop > place.start and not members[border].is_updated_whole
    ]
