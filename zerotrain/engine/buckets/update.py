"""The update of one bucket: its master weight, and the torch optimizers that change it once the gradient is reduced."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.scratch import ScratchPool
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.buckets.whole_tensors import Updates, WholeTensors
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.ranges import named_range
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that one rank updates as one tensor: parameters of one group and generation."""

    where: slice
    """Within this rank's range of the update."""
    target: torch.Tensor
    """The master weight there."""
    key: tuple[int, int]
    """`ManagedParameter.span` of its parameters."""


def update_range(layout: BucketLayout, plan: Plan, rank: int) -> slice:
    """The elements of a bucket that a rank updates: its own shard, or all."""
    return layout.shard(rank) if plan.shards_optimizer else slice(0, layout.padded_numel)


class BucketUpdate:
    """One bucket's part of the optimizer. A bucket can be updated as soon as its gradient is there, and its gather
    issued while the next is updated.

    Args:
        master: over `where`, where a master weight is kept apart from the model's; None where they are one.
        owners: of each tensor that is updated whole (they come first in the bucket), the rank that updates it.
        pool: lends buffers of the master dtype.
    """

    where: slice
    """The elements of the bucket that this rank updates: its own shard, or all."""
    master_weight: torch.Tensor
    """Master dtype, over `where`. The same storage as the model weight where the dtypes are equal."""
    spans: list[Span]
    """What this rank updates by elements."""
    whole: WholeTensors | None
    """What is updated whole; None if there is nothing."""
    has_copy: bool
    """Whether the master weight is kept apart from the model's."""

    def __init__(
        self,
        layout: BucketLayout,
        weights: BucketWeights,
        gradient: BucketGradient,
        *,
        master: torch.Tensor | None,
        groups: ParamGroups,
        owners: Sequence[int],
        collectives: Collectives,
        pool: ScratchPool,
    ) -> None:
        self.spec: BucketSpec = weights.spec
        self.layout = layout
        self.owners = owners
        self._weights, self._gradient = weights, gradient
        self._groups, self._pool = groups, pool
        self._is_sharded = weights.plan.shards_optimizer
        self.where = update_range(layout, weights.plan, collectives.shards.rank)
        self.has_copy = master is not None
        if master is not None:
            self.master_weight = master
        else:
            self.master_weight = weights.shard if self._is_sharded else weights.held
        self.spans = self._cut_spans()
        self._optimizer = groups.optimizer_of((span.key[0], span.target) for span in self.spans)
        self.whole = None
        self._whole_optimizer = None
        if owners:
            self.whole = WholeTensors(
                self.spec.name,
                self.master_weight,
                layout,
                is_sharded=self._is_sharded,
                owners=owners,
                collectives=collectives,
                pool=pool,
            )
            members = self.spec.parameters
            self._whole_optimizer = groups.optimizer_of(
                (members[slot].group, target) for slot, target in self.whole.targets.items()
            )

    def _cut_spans(self) -> list[Span]:
        members = self.spec.parameters
        keys = [(managed.is_updated_whole, managed.span) for managed in members]
        borders = [index for index, key in enumerate(keys) if index == 0 or key != keys[index - 1]]
        places = self.layout.spans(borders, self.where)
        return [
            Span(place, self.master_weight[place].detach(), members[border].span)
            for border, place in zip(borders, places, strict=True)
            if place.stop > place.start and not members[border].is_updated_whole
        ]

    # ---- a step

    def run(self, factor: torch.Tensor | None) -> Iterator[None]:
        """Update the bucket from its reduced gradient, which is read up to the first pause.

        Args:
            factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.

        Returns:
            The work. It pauses where whole tensors are on the wire, for other buckets to go on meanwhile; every rank
            must resume it at the same points.
        """
        with named_range("optimizer", self.spec.name):
            self._weights.about_to_change()
            self._take_writes()
            gradient = self._gradient.reduced()
            widened = None
            if self.has_copy:
                widened = self._pool.take(gradient.numel())
                gradient = widened.storage[: gradient.numel()].copy_(gradient)
            if factor is not None:
                gradient.mul_(factor.to(gradient.dtype))
            self.step(gradient)
            rest: Iterator[None] = iter(())
            if self.whole is not None:
                rest = self.whole.update(gradient, partial(self._run, self._whole_optimizer))
            if widened is not None:
                self._pool.give_back(widened)
        yield from rest
        self._refresh()

    def step(self, gradient: torch.Tensor) -> None:
        """Update what is updated by elements.

        Args:
            gradient: master dtype, over `where`.
        """
        self._run(self._optimizer, [(span.target, gradient[span.where]) for span in self.spans])

    def _run(self, optimizer: torch.optim.Optimizer | None, updates: Updates) -> None:
        if optimizer is None:
            return
        self._groups.show_hyperparameters(optimizer)
        for target, gradient in updates:
            target.grad = gradient
        optimizer.step()
        for target, _ in updates:
            target.grad = None

    def _refresh(self) -> None:
        """The master weight changed: bring what this rank holds of the model weight up to date."""
        self.refilled()
        if self._is_sharded:
            self._weights.reshard()
        self._weights.writes.count_update()

    def _held(self) -> torch.Tensor:
        """Compute dtype, over `where`: what the model reads, or will be gathered from."""
        return self._weights.shard if self._is_sharded else self._weights.model_weight.tensor

    def _take_writes(self) -> None:
        """Others than the engine may have written into the parameters: their elements replace those of the master
        weight, all others keep the bits that the compute dtype does not have."""
        if not self._weights.writes.are_new:
            return
        self._weights.writes.are_new = False
        if self.has_copy:
            self._weights.about_to_change()
            held, master = self._held(), self.master_weight
            torch.where(held == master.to(held.dtype), master, held.to(master.dtype), out=master)

    def load(self, whole: torch.Tensor) -> None:
        """Replace the master weight by this rank's part of (padded_numel,) others; what the optimizer keeps stays."""
        if self.has_copy:
            self.master_weight.copy_(whole[self.where])

    def refilled(self) -> None:
        """The master weight was replaced: bring what this rank holds of the model weight up to date."""
        if self.has_copy:
            self._held().copy_(self.master_weight)

    def current_weight(self) -> torch.Tensor:
        """`master_weight`, with what others than the engine have written into the parameters."""
        self._weights.take_writes()
        self._take_writes()
        return self.master_weight

    # ---- what is kept

    @property
    def separate_master_nbytes(self) -> int:
        """Bytes of the master weight, 0 where it shares the model weight's storage."""
        return self.master_weight.nbytes if self.has_copy else 0

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends in a step so that tensors can be updated whole."""
        return self.whole.sent_nbytes if self.whole is not None else 0

    def span_state(self, span: Span) -> dict[str, Any]:
        """What the optimizer keeps of a span, by name; to be read and written."""
        assert self._optimizer is not None  # there is a span
        state: dict[str, Any] = self._optimizer.state[span.target]
        return state

    def whole_state(self, slot: int) -> dict[str, Any]:
        """What the optimizer keeps of tensor `slot`, which this rank updates whole, by name; to be read and written."""
        assert self.whole is not None
        assert self._whole_optimizer is not None
        state: dict[str, Any] = self._whole_optimizer.state[self.whole.targets[slot]]
        return state

    def hyperparameters_of(self, group: int) -> dict[str, Any]:
        """Of a group by its number, as they are now."""
        return self._groups.hyperparameters[group]

    def element_state_nbytes(self) -> int:
        """Bytes of state this rank keeps of what it updates by elements (0-dim counters left out)."""
        return sum(tensor.nbytes for tensor in tensors_of_state(self._optimizer))

    def state_tensors(self) -> list[torch.Tensor]:
        """All state of this rank (0-dim counters left out)."""
        return [*tensors_of_state(self._optimizer), *tensors_of_state(self._whole_optimizer)]


def tensors_of_state(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """What a torch optimizer keeps of its tensors, without 0-dim counters."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim > 0]
