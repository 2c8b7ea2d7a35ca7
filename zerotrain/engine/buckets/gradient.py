"""The gradient of one bucket: filled parameter by parameter, then reduced over the ranks (`BucketReduction`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerotrain.comm.handles import Scratch, ScratchPool
from zerotrain.engine.buckets.home import EngineParts
from zerotrain.engine.buckets.life import GRADIENT_TRANSITIONS, Backward, GradientState, Life
from zerotrain.engine.buckets.reduction import BucketReduction
from zerotrain.engine.model.forward import named_range
from zerotrain.engine.model.live_parameter import get_grad, set_grad
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout, slot_view

# The sums of a rank's leaves in a step: the tree over all leaves, as far as one rank can build it.
#
# [Note: leaves] A leaf is what one virtual rank computes in a step: the sum of its micro-batches' gradients, one
# after the other, in the dtype of the wire. Leaves are added in pairs, the sums in pairs, and so on, over
# all ranks. A rank runs a power of two of them, builds a whole subtree and sends its root: so the sum has the
# same bits on any number of ranks. A rank adds leaves as a binary counter counts: a sum waits until its neighbour of
# the same size is there.


class Subtrees:
    """The sums of one bucket in wait for a neighbour.

    Args:
        pool: lends the buffers of leaves, in the dtype that these are added in.
    """

    def __init__(self, pool: ScratchPool) -> None:
        self.pool = pool
        self._waiting: list[tuple[int, Scratch]] = []
        """(log2 of the leaves in it, their sum), the largest first."""
        self._root: Scratch | None = None
        """Buffer of the sum of this rank's leaves, on the wire until `clear`."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, leaf: Scratch) -> None:
        """One more leaf; the buffer is no longer the caller's."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            _, neighbour = self._waiting.pop()
            neighbour.storage.add_(leaf.storage)
            self.pool.give_back(leaf)
            leaf, level = neighbour, level + 1
        self._waiting.append((level, leaf))

    def add_last(self, leaf: torch.Tensor) -> torch.Tensor:
        """The root of this rank's leaves; `leaf` is the last. It stays as it is until `clear`."""
        root = leaf
        while self._waiting:
            if self._root is not None:
                self.pool.give_back(self._root)
            _, self._root = self._waiting.pop()
            root = self._root.storage.add_(root)
        return root

    def clear(self) -> None:
        """Forget all sums; the buffers stay for the next step."""
        for _, scratch in self._waiting:
            self.pool.give_back(scratch)
        self._waiting.clear()
        if self._root is not None:
            self.pool.give_back(self._root)
            self._root = None


SEGMENT_NBYTES = 2**18
"""Gradients are moved into the bucket in steps of at least this much: small ones together, a large one alone and
while it is still in the cache."""

LARGE_NUMEL = 2**18
"""A kernel for many tensors gives each 65,536 elements one multiprocessor, and leaves most of a GPU idle where there
are few. Measured on an H200: it moved the gradients of GPT-2 at 0.6 TB/s, of 4.2."""

Gradients = list[torch.Tensor | None]


@dataclass(eq=False)
class Segment:
    """Neighbouring parameters of a bucket; their gradients are moved together."""

    slots: slice
    parameters: list[torch.nn.Parameter]
    ends_large: bool
    """Whether the last of them is large, as no other can be."""
    holds_values: bool = False
    """Whether this step's buffer already holds gradients of this segment, and further ones are added."""

    def gradients(self) -> Gradients:
        """The present gradients of the parameters."""
        return list(map(get_grad, self.parameters))

    def move(self, gradients: Gradients, views: list[torch.Tensor]) -> None:
        """Move gradients from the parameters into a buffer, cut into one of `views` for each slot, or add them to its
        values. None counts as zeros.

        Args:
            gradients: of the parameters. The list is emptied, since its gradients may be large, and whoever waits for
                a collective behind this call has it still.
        """
        targets = views[self.slots]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(targets):
            missing = [target for target, gradient in zip(targets, gradients, strict=True) if gradient is None]
            targets = [target for target, gradient in zip(targets, gradients, strict=True) if gradient is not None]
            if not self.holds_values:
                torch._foreach_zero_(missing)
        if present and self.holds_values:
            torch._foreach_add_(targets, present)
        elif present:
            if self.ends_large:
                targets.pop().copy_(present.pop())  # in a kernel of its own
            if present:
                torch._foreach_copy_(targets, present)
        self.holds_values = True
        gradients.clear()
        self.forget()

    def forget(self) -> None:
        """Take the gradients from the parameters."""
        for parameter in self.parameters:
            set_grad(parameter, None)


def cut_segments(spec: BucketSpec, layout: BucketLayout) -> list[Segment]:
    """Cut a bucket's parameters into segments, in order."""
    segments: list[Segment] = []
    start = nbytes = 0
    for end, slot in enumerate(layout.slots, 1):
        nbytes += slot.numel * spec.dtype.itemsize
        if nbytes >= SEGMENT_NBYTES or end == len(layout.slots):
            ends_large = slot.numel >= LARGE_NUMEL  # and so ends its segment
            segments.append(Segment(slice(start, end), spec.tensors[start:end], ends_large))
            start, nbytes = end, 0
    return segments


class BucketGradient:
    """Owns the gradient storage of a bucket.

    Unreduced gradients fill one flat buffer in the compute dtype: the bucket's own where gradients are replicated, one
    on loan where they are sharded. Over several micro-batches with a lower precision they are first summed
    in the master dtype; over several leaves the sums of those before the last lie in `Subtrees`.
    """

    watch: Callable[[torch.Tensor], object] | None = None
    """Called with each leaf of this rank, flat, while a step is verified: see `engine.verification`."""
    shard: torch.Tensor
    """(shard_numel,) compute dtype: this rank's part of the reduced gradient. See `reduction`."""

    def __init__(self, spec: BucketSpec, layout: BucketLayout, parts: EngineParts) -> None:
        options, collectives = parts.options, parts.collectives
        self.spec, self.layout = spec, layout
        self.precision = options.precision.of_bucket(spec.dtype)
        self.life = Life(f"gradient of {spec.name}", GradientState.EMPTY, GRADIENT_TRANSITIONS)
        self.segments = cut_segments(spec, layout)
        self._pool = parts.pools.pool_of(spec.dtype)
        self._widens = options.widens
        self._own: Scratch | None = None
        """The bucket's own buffer, where gradients are replicated."""
        self._unreduced: Scratch | None = None
        """(padded_numel,) wire dtype, from the filling to the end of the reduction."""
        self._accumulator: Scratch | None = None
        """(padded_numel,) master dtype: the sum over micro-batches, once one was needed."""
        self._accumulates = False
        """Whether this step's gradients go into the accumulator."""
        self._filled: _Cut | None = None
        """The one of these two in use, filled or on its way."""
        if options.plan.shards_gradients:
            self.shard = torch.zeros(layout.shard_numel, dtype=self.precision.compute, device=collectives.world.device)
        else:
            whole = torch.zeros(layout.padded_numel, dtype=self.precision.compute, device=collectives.world.device)
            self._own = Scratch(whole)
            self.shard = self._own.storage[layout.shard(collectives.shards.rank)]
        leaves = ScratchPool(dtype=self.precision.master, device=collectives.world.device, zeros=collectives.zeros)
        self._subtrees = Subtrees(leaves)
        whole_gradient = None if self._own is None else self._own.storage
        self.reduction = BucketReduction(spec.name, self.shard, whole_gradient, parts)

    @property
    def held_nbytes(self) -> int:
        """Bytes of gradient held between steps."""
        return self.shard.nbytes if self._own is None else self._own.storage.nbytes

    @property
    def accumulator_nbytes(self) -> int:
        """Bytes of sums over micro-batches and over leaves in the master dtype, where they were needed."""
        return self._subtrees.pool.held_nbytes

    @property
    def is_reduced(self) -> bool:
        """Whether the last backward of a step has reduced it, or is about to be waited for."""
        return self.reduction.completes and self.life.state in (GradientState.REDUCING, GradientState.REDUCED)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing of this step."""
        return self.life.state is GradientState.EMPTY and not self._subtrees

    @property
    def borrows(self) -> bool:
        """Whether filling takes a buffer on loan; there are only as many as reductions may be in flight."""
        return self._own is None and self.life.state in (GradientState.EMPTY, GradientState.REDUCED)

    # ---- filling

    def begin_filling(self, backward: Backward) -> None:
        """The first gradient of a backward comes: choose what it goes into, unless an earlier backward has."""
        if self.life.state is GradientState.FILLING:
            return
        if self.life.state is GradientState.REDUCED:
            self.reduction.keep_sum()
        self.life.become(GradientState.FILLING)
        adds_up = not backward.reduces and self.precision.separate_master
        self._accumulates = not backward.in_last_leaf or adds_up
        if self._accumulates:
            is_clean = self._accumulator is not None
            buffer = self._accumulator = self._accumulator or self._subtrees.pool.take(self.layout.padded_numel)
        else:
            buffer = self._own or self._pool.take(self.layout.padded_numel, self.layout)
            is_clean = self._own is not None
            self._unreduced = buffer
        self._filled = flat, _ = _cut(buffer, self.layout)
        if not is_clean:
            # The gaps between slots must be zero: they are summed, squared and updated with the rest.
            (flat[self.layout.slots[-1].end :] if self.layout.is_dense else flat).zero_()

    def fill(self, segment: Segment, gradients: Gradients, *, counts: bool = True) -> None:
        """Fill in what has come of a segment.

        Args:
            gradients: see `Segment.move`.
            counts: False: zeros are moved in their place.

        Raises:
            EngineStateError: one is sparse.
        """
        _, views = _begun(self._filled)
        if not counts:
            gradients[:] = [None] * len(gradients)
        try:
            with named_range("move gradient", self.spec.name):
                segment.move(gradients, views)
        except RuntimeError as error:  # torch copies no sparse tensor into a dense one
            for managed, gradient in zip(self.spec.parameters[segment.slots], gradients, strict=True):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise EngineStateError(
                        f"the gradient of {managed.names[0]} is sparse, and buckets hold dense ones: in the forward "
                        "call F.embedding or F.embedding_bag with sparse=False, torch.gather with sparse_grad=False"
                    ) from error
            raise

    def close_leaf(self) -> Scratch:
        """A leaf before the last is complete: zeros where no gradient came, and as it would travel if each rank had one
        leaf. The buffer is no longer this bucket's. See [Note: leaves]."""
        self.begin_filling(Backward(reduces=False, completes=False, in_last_leaf=False))
        for segment in self.segments:
            if not segment.holds_values:
                self.fill(segment, segment.gradients())
        leaf, self._accumulator = self._accumulator, None
        assert leaf is not None  # a leaf before the last is filled into it
        if self.precision.separate_master and not self._widens:
            leaf.storage.copy_(leaf.storage.to(self.precision.compute))
        self._end_filling()
        self.life.become(GradientState.EMPTY)
        return leaf

    def add_leaf(self, *, discards: bool = False) -> None:
        """The same, added to the leaves before it, or discarded."""
        leaf = self.close_leaf()
        if self.watch is not None:
            self.watch(leaf.storage)
        if discards:
            self._subtrees.pool.give_back(leaf)
        else:
            self._subtrees.add(leaf)

    def leaf_alone(self) -> list[torch.Tensor]:
        """The same for its own sake, a tensor for each parameter."""
        leaf = self.close_leaf()
        self._subtrees.pool.hand_over(leaf)
        return _cut(leaf, self.layout)[1]

    # ---- the reduction

    def reduce(self, *, completes: bool = True, discards: bool = False) -> None:
        """Issue the reduction, and say whether it is the step's last; or discard what has been filled. Every segment
        has been filled."""
        if self._accumulates and not self._widens:
            summed, _ = _begun(self._filled)
            self._unreduced = self._own or self._pool.take(self.layout.padded_numel, self.layout)
            self._filled = _cut(self._unreduced, self.layout)
            self._filled[0].copy_(summed)
        leaf, _ = _begun(self._filled)
        if self.watch is not None:
            self.watch(leaf)
        if discards:
            self.drop()
            return
        self.reduction.issue(self._subtrees.add_last(leaf), completes=completes)
        # Behind the call: where it failed, nothing is under way that a clean-up could wait for.
        self.life.become(GradientState.REDUCING)

    def finish_reduce(self) -> None:
        """Wait for the reduction, leave the sum in `shard`, and give the loaned buffers back."""
        self.reduction.finish()
        self._subtrees.clear()
        self._give_back()
        self._end_filling()
        self.life.become(GradientState.REDUCED)

    def follow_graph(self) -> None:
        """A graph has filled and reduced it, as the last backward of a step."""
        self.reduction.completes = True
        self.life.become(GradientState.REDUCED)

    # ---- the end

    def drop(self) -> None:
        """Forget this step's gradient; the buffers stay. A reduction that was prepared will not come, on any rank."""
        self.reduction.drop()
        if self.life.state is GradientState.FILLING:
            self.reduction.give_back()
            self._give_back()
        self._end_filling()
        self._subtrees.clear()
        if self.life.state is not GradientState.EMPTY:
            self.life.become(GradientState.EMPTY)

    def clear_unmoved(self) -> None:
        """Forget gradients not yet moved into the bucket."""
        # Each parameter that is not ready would cost a call into Python: 20,000 of them where a step was skipped.
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                segment.forget()

    def _give_back(self) -> None:
        if self._unreduced is not None and self._own is None:
            self._pool.give_back(self._unreduced)
        if self._accumulator is not None and self._widens:  # which was sent as it was
            self._subtrees.pool.give_back(self._accumulator)
            self._accumulator = None

    def _end_filling(self) -> None:
        """The filled gradient is reduced or dropped: the next one to arrive begins anew."""
        self._unreduced = self._filled = None
        self._accumulates = False
        for segment in self.segments:
            segment.holds_values = False


_Cut = tuple[torch.Tensor, list[torch.Tensor]]
"""The first padded_numel elements of a buffer, and one view for each slot."""


def _cut(scratch: Scratch, layout: BucketLayout) -> _Cut:
    if layout not in scratch.cuts:
        flat = scratch.storage[: layout.padded_numel]
        scratch.cuts[layout] = (flat, [slot_view(flat, slot) for slot in layout.slots])
    cut: _Cut = scratch.cuts[layout]
    return cut


def _begun(filled: _Cut | None) -> _Cut:
    if filled is None:
        raise EngineStateError("a gradient was used that had not been filled; this is a fault of zerotrain itself")
    return filled
