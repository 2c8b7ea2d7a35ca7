"""When each bucket's gradient is reduced: in one order on every rank, whatever gradients each rank has.

[Note: order of reductions]
Buckets are reduced in the reverse of their list. One that is complete early waits for those behind it in the list.
That is not enough if parameters are gathered in the backward too: a rank on which a parameter was not used has a
bucket that never becomes complete. Left open to the end of the backward it held up all reductions before it; another
rank waited for one of them with its next gather unissued, and the first rank for that gather (seen: stage 3, ten
blocks, one linear of one of them unused on rank 0 alone). So a bucket is closed, with zeros for what has not come,
where the backward passes its last unit: before that place's gathers are issued, on every rank alike. Between two such
places it may be reduced as soon as it is complete, if the next place is the one that would close it. (Which places a
backward has passed: [Note: positions in a backward].)
"""

from collections import deque
from collections.abc import Sequence

import torch

from zerotrain.comm.handles import Relayed
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket, require_unchanged
from zerotrain.engine.buckets.gradient import Gradients, Segment
from zerotrain.engine.buckets.life import Backward
from zerotrain.engine.buckets.norm import StepSquares
from zerotrain.engine.model.live_parameter import get_grad, left_its_unit
from zerotrain.engine.schedule.live_unit import LiveUnit
from zerotrain.errors import EngineStateError

MAX_LARGEST_BUCKETS_IN_FLIGHT = 2
"""Unreduced gradients on the wire, in sizes of the largest bucket: one on its way and one behind it keep a link busy.
Counted in elements, not in buckets: two small ones would leave the link idle until the next is full."""
_BEFORE_ALL_NODES = -1


class Reductions:
    """The queue of a backward's reductions.

    Args:
        trained: the buckets with a gradient, in list order.
        units_of: of each, the units whose backward completes it. None or no units: no gather comes in a backward that
            does not end with it, so it is reduced when it is complete, or at the end.
    """

    def __init__(self, trained: Sequence[TrainedBucket], units_of: dict[Bucket, list[LiveUnit]]) -> None:
        self.trained = trained
        self.squares = StepSquares()
        """Squares of the gradients reduced by the last completing backward: of every bucket, once it is finished."""
        self._relayed_gathers: list[Relayed] = []
        for bucket in trained:
            if isinstance(gather := bucket.gradient.reduction.gather, Relayed):
                self._relayed_gathers.append(gather)
        self._under_way = Backward()
        """The backward under way, or the last."""
        self._units_of = units_of
        largest = max((bucket.layout.padded_numel for bucket in trained), default=0)
        self._max_numel_in_flight = MAX_LARGEST_BUCKETS_IN_FLIGHT * largest
        self._waiting: deque[TrainedBucket] = deque()
        """Not issued yet, the next first."""
        self._num_prepared = 0
        """So many of them, from the first on, are ready to receive."""
        self._in_flight: deque[TrainedBucket] = deque()
        """Issued and not finished, the oldest first."""
        self._in_flight_numel = self._prepared_numel = 0
        """Elements of those in flight, and of those prepared: kept, since they are asked for at every segment."""
        self._open_segments: dict[TrainedBucket, set[Segment]] = {}
        """Segments still to come in this backward, by bucket; an empty set once a bucket is complete."""
        self._closed_short: list[TrainedBucket] = []
        """Closed in this backward before all their gradients had come."""
        self._number = 0
        """Its number."""
        self._reached: LiveUnit | None = None
        """The last unit that the backward has reached."""
        self._position = _BEFORE_ALL_NODES
        """The node of that moment."""

    # ---- a backward

    def begin(self, backward: Backward) -> int:
        """A backward starts; return its number."""
        self.finish()  # what an earlier backward of the same step has issued
        if backward.completes:  # a step may still come behind one that does not
            self.squares.clear()
        self._under_way = backward
        self._open_segments = {bucket: set(bucket.gradient.segments) for bucket in self.trained}
        self._closed_short.clear()
        self._number += 1
        self._reached = None
        if backward.reduces:
            self._waiting = deque(reversed(self.trained))
            if not backward.discards:
                self._prepare()
        return self._number

    def arrived(self, bucket: TrainedBucket, segment: Segment, gradients: Gradients) -> bool:
        """All gradients of a segment are there: move them into the bucket; returns whether it was the last one."""
        open_segments = self._open_segments[bucket]
        if segment not in open_segments:
            raise _arrived_twice(bucket, segment)
        self._fill(bucket, segment, gradients)
        open_segments.remove(segment)
        return not open_segments

    def reduce_complete(self, going: TrainedBucket | None) -> None:
        """A bucket is complete: reduce what is, as far as this place of the backward allows.

        Args:
            going: that bucket, if it may go.
        """
        while self._waiting and not self._open_segments[self._waiting[0]]:
            if self._waiting[0] is not going and not self.may_go(self._waiting[0]):
                break
            self._reduce_next()
        if not (self._in_flight and self._in_flight[0].gradient.reduction.ends_with_gather):  # all are alike in it
            # A gather must not be issued when this rank happens to see its reduction done: the model may have
            # collectives of its own in the backward (batch norm over ranks), and the order among them would differ from
            # rank to rank.
            self.finish(wait=False)

    def close_passed(self, position: int, *, within: set[LiveUnit] | None = None) -> None:
        """The backward comes to another unit, at node `position`: close and reduce what it has passed.

        Args:
            within: only buckets that no other units need.
        """
        while self._waiting and self.is_passed(self._waiting[0], position):
            if within is not None and not within.issuperset(self._units_of[self._waiting[0]]):
                return
            self._close(self._waiting[0])
            self._reduce_next()

    def reached(self, unit: LiveUnit, position: int) -> None:
        """The backward has come to `unit`, at node `position`, with all passed buckets closed."""
        self._reached, self._position = unit, position

    def end(self) -> None:
        """The backward is over: close and reduce the rest; what a backward before the last leaves open stays open.

        Raises:
            EngineStateError: requires_grad was changed, or a gradient came when its bucket had been closed.
        """
        for bucket in self._closed_short:
            if late := [entry.names[0] for entry in bucket.spec.parameters if get_grad(entry.parameter) is not None]:
                raise EngineStateError(left_its_unit(f"{bucket.spec.name} (the gradient of {late[0]} was late)"))
        for bucket in self.trained:
            if self._open_segments[bucket]:
                require_unchanged(bucket.spec, trains=True)
            with torch._C.DisableTorchFunctionSubclass():  # which would be a call into Python for each
                for segment in bucket.gradient.segments:
                    has_moved = segment not in self._open_segments[bucket]
                    # Not noticed before where what came last had not come twice: a checkpoint of a part of a unit.
                    if has_moved and segment.gradients().count(None) < len(segment.parameters):
                        raise _arrived_twice(bucket, segment)
        if not self._under_way.reduces:
            for bucket in reversed(self.trained):
                self._move_unmoved(bucket)
            return
        while self._waiting:
            self._close(self._waiting[0])
            self._reduce_next()

    def close_leaf(self, *, discards: bool = False) -> None:
        """A leaf of this rank before the last is complete."""
        for bucket in self.trained:
            bucket.gradient.add_leaf(discards=discards)

    def drop(self) -> None:
        """Forget the gradients since the last step, also those of a broken backward.

        Waits for the reductions under way. All ranks have issued the same ones if they broke off at the same place.
        """
        for bucket in self.trained:
            bucket.gradient.clear_unmoved()
        self.finish()
        self.squares.clear()
        self._waiting.clear()
        self._num_prepared = self._prepared_numel = 0
        for bucket in self.trained:
            bucket.gradient.drop()

    def finish(self, *, wait: bool = True) -> None:
        """Finish the reductions under way, or as many of the oldest as are done."""
        while self._in_flight and (wait or self._in_flight[0].gradient.reduction.handle.is_done()):
            self._finish_oldest()
        if wait:
            for gather in self._relayed_gathers:  # a later wait may come in another order on another rank
                gather.pass_on()

    # ---- the turn of a bucket

    def may_go(self, bucket: TrainedBucket) -> bool:
        """Whether a complete bucket may be reduced and freed at once: every rank closes it before the next gathers."""
        if not self._units_of.get(bucket):
            return True
        return self._reached is not None and self.is_passed(bucket, self._position, self._reached)

    def may_come_again(self, bucket: Bucket) -> bool:
        """Whether a complete bucket may get gradients once more, if the backward computes forwards again: a unit of
        it was called several times."""
        return any(len(unit.calls) > 1 for unit in self._units_of.get(bucket, ()))

    def is_passed(self, bucket: Bucket, position: int, leaving: LiveUnit | None = None) -> bool:
        """Whether no gradient of a bucket will come any more, or none once the backward has left the unit `leaving`."""
        units = self._units_of.get(bucket)
        if not units or bucket.is_read_unannounced:
            return False
        for unit in units:
            passed = unit.passes_next if unit is leaving else unit.is_passed
            if not passed(position, self._number):
                return False
        return True

    def _close(self, bucket: TrainedBucket) -> None:
        """Fill with zeros what has not come."""
        if not self._open_segments[bucket]:
            return
        require_unchanged(bucket.spec, trains=True)
        self._move_unmoved(bucket)
        self._open_segments[bucket].clear()
        self._closed_short.append(bucket)

    def _move_unmoved(self, bucket: TrainedBucket) -> None:
        """Move what came of incomplete segments. Before a reduction zeros stand in for nothing."""
        for segment in bucket.gradient.segments:
            if segment in self._open_segments[bucket]:
                gradients, is_due = segment.gradients(), self._under_way.reduces and not segment.holds_values
                if is_due or any(gradient is not None for gradient in gradients):
                    self._fill(bucket, segment, gradients)

    # ---- room on the wire

    def _reduce_next(self) -> None:
        bucket = self._waiting.popleft()
        if self._under_way.discards:
            bucket.gradient.reduce(discards=True)
            return
        self._num_prepared -= 1  # it is prepared
        self._prepared_numel -= bucket.layout.padded_numel
        self._make_room(bucket)
        bucket.gradient.reduce(completes=self._under_way.completes)
        if self._in_flight and isinstance(earlier := self._in_flight[-1].gradient.reduction.handle, Relayed):
            earlier.pass_on()  # at this place all ranks have issued it, and its inner axis is fast
        self._in_flight.append(bucket)
        self._in_flight_numel += bucket.layout.padded_numel
        self._prepare()

    def _finish_oldest(self) -> None:
        bucket = self._in_flight.popleft()
        self._in_flight_numel -= bucket.layout.padded_numel
        bucket.gradient.finish_reduce()
        if self._under_way.completes:
            self.squares.add(bucket.gradient.reduction.take_squares(self._under_way.loss_scale))

    def _prepare(self) -> None:
        """Be ready to receive for the next reduction, and for more while there is room."""
        while self._num_prepared < len(self._waiting):
            bucket = self._waiting[self._num_prepared]
            ahead_numel = self._in_flight_numel + self._prepared_numel + bucket.layout.padded_numel
            if self._num_prepared and ahead_numel > self._max_numel_in_flight:
                return
            bucket.gradient.reduction.handle.prepare()
            self._num_prepared += 1
            self._prepared_numel += bucket.layout.padded_numel

    def _fill(self, bucket: TrainedBucket, segment: Segment, gradients: Gradients) -> None:
        if bucket.gradient.borrows:
            self._make_room(bucket)
        bucket.gradient.begin_filling(self._under_way)
        bucket.gradient.fill(segment, gradients, counts=self._under_way.counts)

    def _make_room(self, bucket: TrainedBucket) -> None:
        """Finish the oldest reductions until one more bucket may be in flight."""
        while self._in_flight and self._in_flight_numel + bucket.layout.padded_numel > self._max_numel_in_flight:
            self._finish_oldest()


def _arrived_twice(bucket: TrainedBucket, segment: Segment) -> EngineStateError:
    return EngineStateError(
        f"the gradient of {bucket.spec.parameters[segment.slots.start].names[0]} arrived twice in one backward: it was "
        "used in a checkpoint with use_reentrant=True, which has a backward of its own, and once more; call "
        "torch.utils.checkpoint.checkpoint with use_reentrant=False"
    )
