"""Any element-wise torch optimizer over the master shards, one bucket at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import ConfigError

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

NOT_ELEMENTWISE = {
    "Adafactor": "factors whole matrices",
    "LBFGS": "needs all parameters at once",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "needs sparse gradients",
}
"""Optimizers of torch whose update of one element depends on others, which a shard may not hold."""


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is known to need more than a shard holds.

    Raises:
        ConfigError: it is one of `NOT_ELEMENTWISE`.
    """
    kind = type(optimizer).__name__
    if kind in NOT_ELEMENTWISE:
        reason = NOT_ELEMENTWISE[kind]
        raise ConfigError(f"optimizer={kind}: {reason}, which a shard does not hold; use AdamW, SGD or the like")


class ShardedOptimizer:
    """One torch optimizer a bucket, driven by one set of hyperparameters.

    A bucket can be updated as soon as its gradient is there, and its gather issued while the next is updated.
    """

    param_groups: list[dict[str, Any]]
    """The hyperparameters of all buckets; "name" is matrices (two or more dimensions) or others."""

    def __init__(self, factory: OptimizerFactory, weights: Iterable[BucketWeights], *, decay_all: bool) -> None:
        self._decay_all = decay_all
        self._targets: list[list[tuple[slice, torch.Tensor]]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        for each in weights:
            spans = _group_spans(each)
            targets = {name: each.master_weight[span].detach() for name, span in spans.items()}
            groups = [{"params": [target], "name": name} for name, target in targets.items()]
            self._optimizers.append(self._build(factory, groups))
            self._targets.append([(spans[name], target) for name, target in targets.items()])
        by_name = {group["name"]: group for optimizer in self._optimizers for group in optimizer.param_groups}
        self.param_groups = [
            {key: value for key, value in by_name[name].items() if key != "params"} for name in sorted(by_name)
        ]
        for group in self.param_groups:
            group.setdefault("initial_lr", float(group.get("lr", 0.0)))

    def _build(self, factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = factory(groups)
        require_elementwise(optimizer)
        for group in optimizer.param_groups:
            if group["name"] != "matrices" and not self._decay_all and "weight_decay" in group:
                group["weight_decay"] = 0.0
        return optimizer

    def step(self, index: int, gradient: torch.Tensor) -> None:
        """Update bucket `index` with `gradient`: master dtype, over the bucket's optimizer range."""
        optimizer = self._optimizers[index]
        shared = {group["name"]: group for group in self.param_groups}
        for group in optimizer.param_groups:
            group.update(shared[group["name"]])
        for span, target in self._targets[index]:
            target.grad = gradient[span]
        optimizer.step()
        for _, target in self._targets[index]:
            target.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """All per-element state of this rank (0-dim counters left out)."""
        return [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim > 0
        ]


def _group_spans(weights: BucketWeights) -> dict[str, slice]:
    """Where the matrices and the others of a bucket lie in this rank's optimizer range, empty spans left out."""
    members = weights.spec.parameters
    num_matrices = sum(managed.is_matrix for managed in members)
    borders = {"matrices": 0, "others": num_matrices}
    if num_matrices == 0:
        del borders["matrices"]
    if num_matrices == len(members):
        del borders["others"]
    spans = weights.layout.spans(list(borders.values()), weights.optimizer_range)
    return {name: span for name, span in zip(borders, spans, strict=True) if span.stop > span.start}
