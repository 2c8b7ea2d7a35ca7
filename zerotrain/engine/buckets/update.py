"""The update of one bucket: its master weight, and the torch optimizers to change it once the gradient is reduced."""

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.compiled_update import update_span
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import ALIGN_NBYTES, EngineParts, Home
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.buckets.whole_tensors import Updates, WholeTensors
from zerotrain.engine.groups.optimizers import tensors_of_state
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan

# The parts of a bucket, each updated as one tensor.


@dataclass(frozen=True, eq=False)
class Span:
    """A part of a bucket, updated by one rank as one tensor: parameters of one group and generation."""

    where: slice
    """Within this rank's range of the update."""
    target: torch.Tensor
    """The master weight there."""
    key: tuple[int, int]
    """`ManagedParameter.span` of its parameters."""


def update_range(layout: BucketLayout, plan: Plan, rank: int) -> slice:
    """The elements of a bucket for a rank to update: its own shard, or all."""
    return layout.shard(rank) if plan.shards_optimizer else slice(0, layout.padded_numel)


def cut_spans(
    layout: BucketLayout, runs: Sequence[tuple[int, tuple[int, int] | None]], where: slice, master_weight: torch.Tensor
) -> list[Span]:
    """The spans that a rank updates by elements within `where`: neighbours of one group and generation together.

    Args:
        runs: of the bucket's spec.
    """
    places = layout.spans([index for index, _ in runs], where)
    return [
        Span(place, master_weight[place].detach(), key)
        for (_, key), place in zip(runs, places, strict=True)
        if place.stop > place.start and key is not None
    ]


SWAPPED_NUMEL = 2**20
"""Elements of weights and average, exchanged at a time."""


class BucketUpdate:
    """One bucket's part of the optimizer. A bucket can be updated as soon as its gradient is there, and its gather
    issued while the next is updated.

    Args:
        master: over `where`, where a master weight is kept apart from the model's; None where they are one.
        owners: of each tensor that is updated whole (they come first in the bucket), the rank that updates it.
    """

    average: torch.Tensor | None = None
    """Moving average of the master weight, over the same elements; None before its first update."""

    def __init__(
        self,
        weights: BucketWeights,
        gradient: BucketGradient,
        master: torch.Tensor | None,
        owners: Sequence[int],
        parts: EngineParts,
    ) -> None:
        groups, collectives, homes = parts.groups, parts.collectives, parts.homes
        self.spec: BucketSpec = weights.spec
        self.layout = layout = weights.layout
        self.owners = owners
        self._weights, self._gradient = weights, gradient
        self.groups, self.pool = groups, parts.pools.pool_of(parts.options.precision.master)
        self.is_compiled = parts.options.zero.compiled_update
        """Update by elements in one compiled pass, and not by torch's optimizer."""
        self._is_sharded = weights.plan.shards_optimizer
        self.where = update_range(layout, weights.plan, collectives.shards.rank)
        """The elements of the bucket that this rank updates: its own shard, or all."""
        self.has_copy = master is not None
        """Whether the master weight is kept apart from the model's."""
        if master is None:
            master = weights.shard if self._is_sharded else weights.held
        self.master_weight = master
        """Master dtype, over `where`. The same storage as the model weight where the dtypes are equal."""
        self.spans = cut_spans(layout, self.spec.runs, self.where, self.master_weight)
        """This rank's updates by elements."""
        self.optimizer = groups.optimizer_of((span.key[0], span.target) for span in self.spans)
        self.whole: WholeTensors | None = None
        """Tensors that are updated whole; None if there are none."""
        self.whole_optimizer = None
        if owners:
            self.whole = WholeTensors(
                self.spec.name,
                self.master_weight,
                layout,
                is_sharded=self._is_sharded,
                owners=owners,
                collectives=collectives,
                pool=self.pool,
            )
            members = self.spec.parameters
            self.whole_optimizer = groups.optimizer_of(
                (members[slot].group, target) for slot, target in self.whole.targets.items()
            )
        # The update holds its home: a circle would keep the memory of both until Python collects it.
        own = weakref.proxy(self)
        num_targets = len(self.spans) + (len(self.whole.targets) if self.whole is not None else 0)
        self.home: Home = homes.of_optimizer(
            self.spec, lambda: self.planned_nbytes() + 2 * ALIGN_NBYTES * num_targets, lambda: own.tensors()
        )
        (self.home if self.has_copy else weights.home).tell(lambda: own.follow_master())
        self.home.put_away()
        self.home.forget()
        self.crossing = homes.crossing if self.home.moves else None
        self.device = self.home.device or collectives.world.device
        """The device on which the optimizer computes."""
        self.is_away = self.home.moves or weights.home.moves
        """Whether something of what is updated lies off the device at rest."""

    def planned_nbytes(self) -> int:
        """Bytes of the optimizer's state, once it is made, and of a master weight if that is a copy."""
        sampled, owned = self.groups.sampled_nbytes, self.whole.targets.values() if self.whole is not None else ()
        state = sampled(sum(span.target.numel() for span in self.spans), is_whole=False)
        return self.separate_master_nbytes + state + sampled(sum(map(torch.numel, owned)), is_whole=True)

    def tensors(self) -> Iterator[tuple[Hashable, torch.Tensor]]:
        """The tensors that belong at home."""
        if self.has_copy:
            yield "master weight", self.master_weight
        if self.average is not None:
            yield "average", self.average
        for number, optimizer in enumerate((self.optimizer, self.whole_optimizer)):
            for place, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
                for name, value in state.items():
                    if type(value) is torch.Tensor and value.ndim > 0:
                        yield (number, place, name), value

    def follow_master(self) -> None:
        """The master weight has other memory under it: so have the parts of it that are updated."""
        for span in self.spans:
            span.target.data = self.master_weight[span.where]
        if self.whole is not None:
            self.whole.follow_master()

    # ---- a step

    def fetch(self) -> None:
        """Begin to bring to the device what `run` will need."""
        self.home.fetch()
        if not self.has_copy:
            self._weights.fetch_shard()

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Bring what is updated to where it can be computed with, and written to, and back."""
        self.home.open()
        try:
            self._weights.home.open(replaced=self.has_copy and not self._weights.writes.are_new)
            try:
                yield
                if self._weights.home.moves and self._weights.refresh is not None:
                    self._weights.refresh.issue()
                    self._weights.refresh.finish()
            finally:
                self._weights.home.close()
        finally:
            self.home.close()

    def scaled(self, factor: torch.Tensor | None, lent: torch.Tensor | None) -> torch.Tensor:
        """The reduced gradient times `factor`, over `where`; in `lent`, of the master dtype, if the master weight is
        kept apart, and else where it lies."""
        gradient = self._gradient.reduction.reduced()
        if lent is not None and self.has_copy:
            return scaled(gradient, factor, lent)
        return gradient if factor is None else gradient.mul_(factor.to(gradient.dtype))

    def run_compiled(self, factor: torch.Tensor, is_off: torch.Tensor) -> None:
        """Update the spans in one compiled pass, and what this rank holds of the model weight with them; see
        `update_span`."""
        gradient, held = self._gradient.reduction.reduced(), self._held() if self.has_copy else None
        for span in self.spans:
            group, weight = self.groups.hyperparameters[span.key[0]], None if held is None else held[span.where]
            assert self.optimizer is not None  # there is a span
            state = self.optimizer.state[span.target]
            update_span(state, group, span.target, gradient[span.where], weight, factor, is_off)

    def changed(self) -> None:
        """The master weight changed, and what this rank holds of the model weight with it: tell those who read it."""
        if self._is_sharded:
            self._weights.reshard()
        self._weights.writes.count_update()

    def _held(self) -> torch.Tensor:
        """Compute dtype, over `where`: what the model reads, or will be gathered from."""
        return self._weights.shard if self._is_sharded else self._weights.model_weight.tensor

    def take_writes(self) -> None:
        """Others than the engine may have written into the parameters: their elements replace those of the master
        weight, all others keep the bits that the compute dtype does not have."""
        if not self._weights.writes.are_new:
            return
        self._weights.writes.are_new = False
        if self.has_copy:
            self._weights.about_to_change()
            master = self.master_weight
            held = self._held().to(master.device)
            torch.where(held == master.to(held.dtype), master, held.to(master.dtype), out=master)

    def refilled(self) -> None:
        """The master weight was replaced: bring what this rank holds of the model weight up to date."""
        if not self.has_copy:
            return
        if self.crossing is not None:
            self.crossing.send(self.master_weight, self._held())
        else:
            self._held().copy_(self.master_weight)

    def current_weight(self) -> torch.Tensor:
        """`master_weight`, with what others than the engine have written into the parameters."""
        self.home.put_away()
        self._weights.home.put_away()
        self._weights.take_writes()
        self.take_writes()
        return self.master_weight

    def update_average(self, share: float) -> None:
        """Bring the average nearer to the master weight, which was updated: by this share of what lies between. At
        first it is the weight itself."""
        if self.average is None:
            self.average = self.master_weight.detach().clone()
        else:
            self.average.lerp_(self.master_weight.detach(), share)

    def swap_average(self) -> None:
        """Let the average and the weights change places, between steps; a few MiB are held twice meanwhile."""
        weight, average = self.current_weight(), self.average
        assert average is not None  # it has been updated
        self._weights.about_to_change()
        for weights, averages in zip(weight.split(SWAPPED_NUMEL), average.split(SWAPPED_NUMEL), strict=True):
            former = weights.clone()
            weights.copy_(averages)
            averages.copy_(former)
        self.refilled()
        self.changed()

    # ---- what is kept

    @property
    def separate_master_nbytes(self) -> int:
        """Bytes of the master weight, 0 where it shares the model weight's storage."""
        return self.master_weight.nbytes if self.has_copy else 0

    def state_tensors(self) -> list[torch.Tensor]:
        """All state of this rank (0-dim counters left out)."""
        return [*tensors_of_state(self.optimizer), *tensors_of_state(self.whole_optimizer)]

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends in a step so that tensors can be updated whole."""
        return self.whole.sent_nbytes if self.whole is not None else 0

    def span_state(self, span: Span) -> dict[str, Any]:
        """Optimizer state of a span, by name; to be read and written."""
        assert self.optimizer is not None  # there is a span
        self.home.put_away()
        state: dict[str, Any] = self.optimizer.state[span.target]
        return state

    def whole_state(self, slot: int) -> dict[str, Any]:
        """Optimizer state of tensor `slot`, which this rank updates whole, by name; to be read and written."""
        assert self.whole is not None
        assert self.whole_optimizer is not None
        self.home.put_away()
        state: dict[str, Any] = self.whole_optimizer.state[self.whole.targets[slot]]
        return state

    def state_at_first(self, group: int, target: torch.Tensor) -> dict[str, Any]:
        """State that the optimizer of a group has of a tensor before the first gradient: of most optimizers none."""
        optimizer = self.groups.optimizer_of([(group, target)])
        assert optimizer is not None
        state: dict[str, Any] = optimizer.state.get(target, {})
        return state

    @property
    def held_nbytes(self) -> int:
        """Bytes of optimizer state, separate master weight and average on the device between updates."""
        if self.home.nbytes:
            return 0
        average = 0 if self.average is None else self.average.nbytes
        return self.separate_master_nbytes + average + sum(tensor.nbytes for tensor in self.state_tensors())


def scaled(gradient: torch.Tensor, factor: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Leave a gradient times `factor`, 0-dim, in `out`, of a wider dtype; None for 1. The product is taken in the wider
    dtype. A GPU does both in one pass; on a CPU torch would widen into memory of its own."""
    if factor is None:
        return out.copy_(gradient)
    factor = factor.to(out.dtype)
    if device_of(out.device).is_host:
        return out.copy_(gradient).mul_(factor)
    return torch.mul(gradient, factor.view(1), out=out)  # one of 0 dimensions would be rounded to the narrow dtype


def step_on_lent(optimizer: torch.optim.Optimizer, updates: Updates) -> None:
    """Let an optimizer update tensors by their gradients. Each has the same memory under it afterwards.

    In plain PyTorch a weight is the optimizer's to replace (`p.data = ...`, `p.set_`, `torch.utils.swap_tensors`), and
    a gradient its to keep. Here others read the memory of both. So what a weight has become is brought back into its
    memory, and what is kept of either gets memory of its own.

    Raises:
        EngineStateError: it gave one of them another shape or dtype.
    """
    lent = [target.detach() for target, _ in updates]
    for target, gradient in updates:
        target.grad = gradient
    try:
        optimizer.step()
    finally:
        for target, gradient in updates:
            target.grad = None
            _keep_apart(optimizer, target, gradient)
        replaced = []
        for (target, _), memory in zip(updates, lent, strict=True):
            if target.dtype != memory.dtype or not target.is_set_to(memory):
                replaced.append((target, memory))
        if replaced:
            _bring_back(optimizer, replaced)


def _keep_apart(optimizer: torch.optim.Optimizer, target: torch.Tensor, lent: torch.Tensor) -> None:
    """Give memory of its own to optimizer state of a tensor, if it is a part of lent memory."""
    state: dict[str, Any] = optimizer.state.get(target, {})
    start = lent.data_ptr()
    for name, value in state.items():
        if type(value) is torch.Tensor and start <= value.data_ptr() < start + lent.nbytes:
            state[name] = value.clone()


def _bring_back(optimizer: torch.optim.Optimizer, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the new values of tensors into their former memory, and put it under them again."""
    became = []
    for target, memory in replaced:
        _keep_apart(optimizer, target, memory)
        new = target.detach()
        is_part = new.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        became.append(new.clone() if is_part else new)  # a transposed view would be read half written
        target.data = memory
    for new, (_, memory) in zip(became, replaced, strict=True):
        if (new.shape, new.dtype) != (memory.shape, memory.dtype):
            raise EngineStateError(
                f"optimizer={type(optimizer).__name__}: its step made a weight of shape {tuple(memory.shape)} and "
                f"{memory.dtype} one of {tuple(new.shape)} and {new.dtype}; let it keep both"
            )
        memory.copy_(new)
