"""The gradient of one bucket: filled parameter by parameter, reduced over ranks, then handed to the optimizer."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from zerotrain.comm.collectives import Collectives, Pending
from zerotrain.comm.exchange import Exchange
from zerotrain.engine.norm import block_squares, digit_sums
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.ranges import named_range
from zerotrain.engine.scratch import Scratch, ScratchPool
from zerotrain.engine.states import GRADIENT_TRANSITIONS, GradientState, Life
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout

SEGMENT_NBYTES = 2**18
"""Gradients are moved into the bucket in steps of at least this much: small ones together, a large one alone and
while it is still in the cache."""


@dataclass(eq=False)
class Segment:
    """Neighbouring parameters of a bucket whose gradients are moved together."""

    slots: range
    parameters: list[torch.nn.Parameter]
    holds_values: bool = False
    """Whether this step's buffer already holds gradients of this segment, so that further ones are added."""


class BucketGradient:
    """Owns the gradient storage of a bucket.

    Unreduced gradients fill one flat buffer in the wire dtype: the bucket's own where gradients are
    replicated, a scratch on loan where they are sharded. Over several micro-batches with a lower wire
    precision they are first summed in the master dtype.
    """

    shard: torch.Tensor
    """(shard_numel,) wire dtype: this rank's part of the reduced gradient."""
    digit_sums: torch.Tensor
    """(5,) fp64: what the norm is made of, once reduced. Without the loss scale."""

    def __init__(
        self,
        spec: BucketSpec,
        layout: BucketLayout,
        tag: int,
        *,
        options: EngineOptions,
        collectives: Collectives,
        pool: ScratchPool,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.plan = plan = options.plan
        self.precision = precision = options.precision.of_bucket(spec.dtype)
        self.collectives = collectives
        self.pool = pool
        self._exact_norm = options.max_grad_norm is not None
        self._tag = tag
        self.life = Life(f"gradient of {spec.parameters[0].names[0]}", GradientState.EMPTY, GRADIENT_TRANSITIONS)
        self.segments = self._cut_segments()
        self._own: Scratch | None = None
        self._filling: Scratch | None = None
        self._accumulator: Scratch | None = None
        self._accumulating = False
        self._carry: torch.Tensor | None = None
        self._received: Scratch | None = None
        self._received_flat: torch.Tensor | None = None
        self._expected: Exchange | None = None
        self._pending: Pending | None = None
        device = collectives.world.device
        if plan.shards_gradients:
            self.shard = torch.zeros(layout.shard_numel, dtype=precision.compute, device=device)
        else:
            self._own = Scratch(torch.zeros(layout.padded_numel, dtype=precision.compute, device=device))
            self.shard = self._own.storage[layout.shard(collectives.world.rank)]

    def _cut_segments(self) -> list[Segment]:
        segments: list[Segment] = []
        start = nbytes = 0
        parameters = [managed.parameter for managed in self.spec.parameters]
        for index, parameter in enumerate(parameters):
            nbytes += parameter.nbytes
            if nbytes >= SEGMENT_NBYTES or index == len(parameters) - 1:
                segments.append(Segment(range(start, index + 1), parameters[start : index + 1]))
                start, nbytes = index + 1, 0
        return segments

    @property
    def held_nbytes(self) -> int:
        """Bytes of gradient held between steps."""
        return self.shard.nbytes if self._own is None else self._own.storage.nbytes

    @property
    def accumulator_nbytes(self) -> int:
        """Bytes of the sum over micro-batches in the master dtype, where one was needed."""
        return 0 if self._accumulator is None else self._accumulator.storage.nbytes

    def fill(self, segment: Segment, *, more_to_come: bool) -> None:
        """Move the gradients of a segment's parameters into the bucket, or add them to what it holds.

        Args:
            more_to_come: further micro-batches follow before the reduction.
        """
        views = self._target(more_to_come)
        present = [(views[slot], p.grad) for slot, p in zip(segment.slots, segment.parameters, strict=True)]
        targets = [target for target, grad in present if grad is not None]
        grads = [grad for _, grad in present if grad is not None]
        if segment.holds_values:
            if grads:
                torch._foreach_add_(targets, grads)
        else:
            if len(grads) < len(present):
                torch._foreach_zero_([target for target, grad in present if grad is None])
            if grads:
                torch._foreach_copy_(targets, grads)
            segment.holds_values = True
        for parameter in segment.parameters:
            parameter.grad = None

    def _target(self, more_to_come: bool) -> list[torch.Tensor]:
        """The views that gradients go into now, from the buffer that this step's filling began with."""
        if self.life.state is not GradientState.FILLING:
            self._begin_filling(accumulate=more_to_come and self.precision.separate_master)
        buffer = self._accumulator if self._accumulating else self._filling
        return _held(buffer).cut(self.layout)[1]

    def _begin_filling(self, accumulate: bool) -> None:
        if self.life.state is GradientState.REDUCED:
            self._wait_gathered()
            self._carry = self.shard.to(self.precision.master, copy=True)
        self.life.become(GradientState.FILLING)
        self._accumulating = accumulate
        if accumulate:
            if self._accumulator is None:
                empty = torch.zeros(self.layout.padded_numel, dtype=self.precision.master, device=self.shard.device)
                self._accumulator = Scratch(empty)
        else:
            self._filling = self._wire_buffer()

    def _wire_buffer(self) -> Scratch:
        if self._own is not None:
            return self._own
        scratch = self.pool.take(self.layout.padded_numel, self.layout)
        flat, _ = scratch.cut(self.layout)
        last = self.layout.slots[-1].end
        # What lies between slots must be zero: it is summed, squared and updated with the rest.
        (flat[last:] if self.layout.is_dense else flat).zero_()
        return scratch

    def expect_reduce(self) -> None:
        """Be ready for what the other ranks send to the reduction, which may come before this rank's own part."""
        if self.collectives.ordered:
            numel = self.collectives.received_numel(self.layout.padded_numel)
            self._received = self.pool.take(numel)
            self._received_flat = self._received.storage[:numel]
            self._expected = self.collectives.expect_reduce(self._received_flat, self._tag, name=self.spec.name)

    def stop_expecting(self) -> None:
        """The reduction will not come. Which buckets expect one differs from rank to rank, but for posted receives."""
        if self._expected is None:
            self._give_back_received()
            return
        for segment in self.segments:  # only what is sent to it ends a receive
            if not segment.holds_values:
                self.fill(segment, more_to_come=False)
        self.reduce()
        self.finish_reduce(loss_scale=1.0)

    def reduce(self) -> None:
        """Issue the reduction. Every segment has been filled (with zeros where no gradient came)."""
        if self._accumulating:
            self._filling = self._wire_buffer()
            self._filling.cut(self.layout)[0].copy_(_held(self._accumulator).storage)
        unreduced = _held(self._filling).cut(self.layout)[0]
        self.life.become(GradientState.REDUCING)
        with named_range("reduce", self.spec.name):
            self._pending = self.collectives.reduce(
                unreduced, self._received_flat, self.shard, self._expected, name=self.spec.name
            )
        self._expected = None

    @property
    def reduction_done(self) -> bool:
        """Whether `finish_reduce` would not have to wait."""
        return self._pending is None or self._pending.done()

    def finish_reduce(self, loss_scale: float) -> None:
        """Wait for the reduction, leave the sum in `shard`, and give the loaned buffers back.

        Where the optimizer is replicated the reduced shards are gathered at once; `reduced` waits for that.

        Args:
            loss_scale: a power of two that the gradient is too large by, and will be divided by later.
        """
        unreduced = _held(self._filling).cut(self.layout)[0]
        with named_range("wait for reduce", self.spec.name):
            _held(self._pending).wait()
        with named_range("sum", self.spec.name):
            self.collectives.finish_reduce(unreduced, self._received_flat, self.shard)
        self._pending = None
        if self._carry is not None:
            self.shard.copy_(self._carry.add_(self.shard))
            self._carry = None
        self._give_back_received()
        # Now, beside the reductions still under way, and while the shard is in the cache.
        squares = block_squares(self.shard, exact=self._exact_norm)
        if loss_scale != 1.0:
            squares /= loss_scale**2  # not out of the sum: that would be cut at other bits
        self.digit_sums = digit_sums(squares)
        if self._own is None:
            self.pool.give_back(_held(self._filling))
        elif not self.plan.shards_optimizer:
            with named_range("gather gradient", self.spec.name):
                name = f"the gradient of {self.spec.name}"
                self._pending = self.collectives.gather(self._own.storage, self.shard, self._tag, name=name)
        self._end_filling()
        self.life.become(GradientState.REDUCED)

    def _give_back_received(self) -> None:
        if self._received is not None:
            self.pool.give_back(self._received)
            self._received = self._received_flat = None

    def reduced(self) -> torch.Tensor:
        """The reduced gradient over this rank's optimizer range, wire dtype."""
        self._wait_gathered()
        return self.shard if self.plan.shards_optimizer or self._own is None else self._own.storage

    def _wait_gathered(self) -> None:
        if self._pending is not None:
            with named_range("wait for gather gradient", self.spec.name):
                self._pending.wait()
            self._pending = None

    def drop(self) -> None:
        """Forget this step's gradient; the buffers stay."""
        self._wait_gathered()
        if self.life.state is GradientState.FILLING and self._filling is not None and self._own is None:
            self.pool.give_back(self._filling)
        self._end_filling()
        self._carry = None
        if self.life.state is not GradientState.EMPTY:
            self.life.become(GradientState.EMPTY)

    def clear_unmoved(self) -> None:
        """Forget gradients that have not been moved into the bucket."""
        for segment in self.segments:
            for parameter in segment.parameters:
                parameter.grad = None

    def _end_filling(self) -> None:
        """What was filled is reduced or dropped: the next gradient to arrive begins anew."""
        self._filling = None
        self._accumulating = False
        for segment in self.segments:
            segment.holds_values = False


T = TypeVar("T")


def _held(value: T | None) -> T:
    """What this part of a gradient's life always holds."""
    if value is None:
        raise EngineStateError("a gradient was reduced that had not been filled; this is a fault of zerotrain itself")
    return value
