"""What to gather and what to reduce next: the same list order on every rank, at every stage.

[Note: order of collectives]
Ranks must issue collectives in one order. Gathers follow the list of buckets (which is the order of the forward) or,
for sharded parameters, the calls of the units. Reductions follow the list backwards: a bucket that is complete early
waits until the ones behind it in the list were issued, and what an unused parameter left open is closed at the end of
the backward.
"""

from collections import deque
from collections.abc import Sequence

from zerotrain.engine.gradients import BucketGradient, Segment
from zerotrain.engine.lazy_parameter import LEFT_ITS_UNIT
from zerotrain.engine.live_unit import Bucket, FrozenParameters, LiveUnit, next_buckets, require_still_trained
from zerotrain.engine.states import GradientState, Phase
from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import EngineStateError
from zerotrain.sharding.plan import Plan

MAX_LARGEST_BUCKETS_IN_FLIGHT = 2
"""Unreduced gradients on the wire, in sizes of the largest bucket: one on its way and one behind it keep a link busy.
Counted in elements, not in buckets: two small ones would leave the link idle until the next is full."""


class Schedule:
    """Decides when each bucket is gathered, freed and reduced.

    Args:
        prefetch: how many units ahead are gathered where parameters are sharded.
        reshard_after_forward: free sharded parameters between a unit's forward and its backward.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        buckets: Sequence[Bucket],
        *,
        plan: Plan,
        prefetch: int,
        reshard_after_forward: bool,
    ) -> None:
        self.units = units
        self.buckets = buckets
        self.plan = plan
        self.phase = Phase.IDLE
        self.more_to_come = False
        """Whether the backward under way is not the last before the step."""
        self.loss_scale = 1.0
        """What the loss of the backward under way is multiplied with."""
        self.frees_after_use = plan.shards_parameters and reshard_after_forward
        self.trained = [(bucket.weights, bucket.gradient) for bucket in buckets if bucket.gradient is not None]
        """The buckets with a gradient, in list order."""
        self._frozen = FrozenParameters(buckets)
        largest = max((gradient.layout.padded_numel for _, gradient in self.trained), default=0)
        self._max_in_flight = MAX_LARGEST_BUCKETS_IN_FLIGHT * largest
        self._to_expect: deque[BucketGradient] = deque()
        self._expected: deque[BucketGradient] = deque()
        self._in_flight: deque[BucketGradient] = deque()
        self._full_gradients: set[BucketGradient] = set()
        self._open_segments: dict[BucketGradient, set[Segment]] = {}
        self._running: list[LiveUnit] = []
        """The units whose forward is under way, outermost first."""
        self._in_backward: LiveUnit | None = None
        """The unit that a backward reached last."""
        self._look_ahead(prefetch if plan.shards_parameters else 0)

    def _look_ahead(self, prefetch: int) -> None:
        """Fill in what each unit gathers ahead; units that share all their buckets count as one."""
        for bucket in self.units[0].buckets + self.units[-1].buckets:
            bucket.stays_full = True
        for index, unit in enumerate(self.units):
            later = {id(bucket) for other in self.units[index + 1 :] for bucket in other.buckets}
            unit.last_of = [bucket for bucket in unit.buckets if id(bucket) not in later]
            unit.ahead_in_forward = next_buckets(unit, self.units[index + 1 :], prefetch)
            unit.ahead_in_backward = next_buckets(unit, self.units[:index][::-1], prefetch)

    # ---- weights

    def before_forward(self, unit: LiveUnit) -> None:
        """Make the unit's parameters complete, and gather ahead. In a recomputation gather ahead backwards.

        Raises:
            EngineStateError: they are sharded and the engine is idle, where a gather would need all ranks to ask.
        """
        self._refuse_idle(unit.name, "was called")
        if self.frees_after_use and self.phase is Phase.FORWARD:
            if self._running:
                self._running[-1].calls_units = True
            self._running.append(unit)
        ahead = unit.ahead_in_backward if self.phase is Phase.BACKWARD else unit.ahead_in_forward
        self._complete(unit.buckets, ahead)

    def after_forward(self, unit: LiveUnit) -> None:
        """Free what no later unit needs, unless the backward needs it at once or is under way."""
        if self.frees_after_use and self.phase is Phase.FORWARD:
            del self._running[self._running.index(unit) :]
            for bucket in unit.last_of:
                if not bucket.stays_full:
                    bucket.weights.reshard()

    def keep(self, unit: LiveUnit) -> None:
        """The unit's backward cannot be announced in time: from now on its parameters stay from forward to backward."""
        if self.phase is Phase.FORWARD:
            for bucket in unit.buckets:
                bucket.stays_full = True

    def before_backward(self, unit: LiveUnit) -> None:
        """Make the unit's parameters complete for its backward, gather the unit before it and free the one behind it.

        Raises:
            EngineStateError: they are sharded and the engine is idle.
        """
        if self.phase is not Phase.BACKWARD:
            self._refuse_idle(unit.name, "was reached by a backward")
            # torch.autograd.grad within a forward. A backward through its result reads the weights without a hook.
            self.keep(unit)
            self._complete(unit.buckets, [])
            return
        self._free_behind(unit)
        self._complete(unit.buckets, unit.ahead_in_backward)

    def _free_behind(self, unit: LiveUnit) -> None:
        """A backward reached `unit`, so it is done with the unit it reached before: free what that one left full.

        Most are freed when their gradient is done. Frozen ones have none, and that of two forwards is not done before
        the backward of the second.
        """
        behind, self._in_backward = self._in_backward, unit
        if not self.frees_after_use or behind is None or behind is unit or behind.calls_units:
            return
        for bucket in behind.buckets:
            if not (bucket.stays_full or bucket in unit.buckets):
                bucket.weights.reshard()

    def _complete(self, buckets: Sequence[Bucket], ahead: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.weights.start_gather()
        # Issued before the wait: the next gather runs while this unit computes, and right behind this one.
        for bucket in ahead:
            bucket.weights.start_gather()
        for bucket in buckets:
            bucket.weights.finish_gather()

    def touch(self, bucket: Bucket) -> None:
        """A parameter was read that no hook announced: complete its bucket.

        Raises:
            EngineStateError: it is sharded and the engine is idle, where a gather would need all ranks to ask.
        """
        self._refuse_idle(bucket.weights.spec.parameters[0].names[0], "or a parameter beside it was read")
        # What announced no forward announces no backward either.
        bucket.stays_full = True
        self._complete([bucket], [])

    def _refuse_idle(self, name: str, what: str) -> None:
        if self.plan.shards_parameters and self.phase is Phase.IDLE:
            raise EngineStateError(
                f"{name} {what} between engine calls, where parameters are sharded over the ranks. Call the model as "
                "engine(...); call engine.backward(loss), not loss.backward(); on all ranks call parts of the model, "
                "or torch.autograd.grad, inside `with engine.forward_scope()`; take weights from "
                "engine.full_state_dict()"
            )

    def end_forward(self, *, backward_follows: bool) -> None:
        """The model returned: free what a call out of the usual order left full."""
        if not self.frees_after_use:
            return
        self._running.clear()
        for bucket in self.buckets:
            if not (backward_follows and bucket.stays_full):
                self._rest(bucket)
            elif bucket.weights.is_full:
                bucket.awaits_backward = True

    def _rest(self, bucket: Bucket) -> None:
        """Reshard, also a bucket that was gathered ahead and not used."""
        bucket.weights.finish_gather()
        bucket.weights.reshard()

    @property
    def _gathers_updated(self) -> bool:
        """Whether updated weights are gathered at once, and not on use."""
        return self.plan.shards_optimizer and not self.plan.shards_parameters

    def expect_updated(self) -> None:
        """The optimizer is about to update the weights: be ready for the other ranks' parts."""
        if self._gathers_updated:
            for weights, _ in self.trained:
                weights.expect_gather()

    def gather_updated(self, weights: BucketWeights) -> None:
        """The optimizer updated this bucket: issue the gather that the next forward waits for."""
        if self._gathers_updated:
            weights.start_gather()

    # ---- gradients

    def begin_backward(self, *, more_to_come: bool, loss_scale: float) -> None:
        """A backward starts: what its forward left full must be there, also if another call came between.

        Raises:
            EngineStateError: a frozen parameter has been told to train behind the engine's back.
        """
        self._frozen.require_frozen()
        self._complete([bucket for bucket in self.buckets if bucket.awaits_backward], [])
        self._in_backward = None
        self.more_to_come = more_to_come
        self.loss_scale = loss_scale
        self._full_gradients.clear()
        if not more_to_come:
            self._to_expect = deque(gradient for _, gradient in reversed(self.trained))
            self._expect_reductions()
        self._open_segments = {gradient: set(gradient.segments) for _, gradient in self.trained}

    def segment_arrived(self, weights: BucketWeights, gradient: BucketGradient, segment: Segment) -> None:
        """All gradients of a segment are there: move them into the bucket; with its last one the bucket is done."""
        if self.phase is not Phase.BACKWARD:
            self._clear_unmoved()
            raise EngineStateError(
                "gradients arrived outside engine.backward(); call engine.backward(loss), not loss.backward()"
            )
        if not weights.is_full:
            raise EngineStateError(LEFT_ITS_UNIT.format(weights.spec.name))
        if segment not in self._open_segments[gradient]:
            raise EngineStateError(
                f"the gradient of {weights.spec.parameters[segment.slots.start].names[0]} arrived twice in one "
                "backward: it was used in two checkpoints with use_reentrant=True, and each has a backward of its own; "
                "call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if gradient.life.state in (GradientState.EMPTY, GradientState.REDUCED):
            self._make_room(gradient)
        gradient.fill(segment, more_to_come=self.more_to_come)
        self._open_segments[gradient].remove(segment)
        if not self._open_segments[gradient]:
            self._gradient_done(weights, gradient)

    def _gradient_done(self, weights: BucketWeights, gradient: BucketGradient) -> None:
        if self.frees_after_use:
            weights.reshard()
        if self.more_to_come:
            return
        self._full_gradients.add(gradient)
        while self._expected and self._expected[0] in self._full_gradients:
            first = self._expected.popleft()
            self._make_room(first)
            first.reduce()
            self._in_flight.append(first)
            self._expect_reductions()
        self._finish_reductions(wait=False)

    def _expect_reductions(self) -> None:
        """Be ready to receive for the next reduction, and for more while there is room."""
        while self._to_expect and (not self._expected or self._has_room(self._to_expect[0])):
            self._expected.append(self._to_expect.popleft())
            self._expected[-1].expect_reduce()

    def _has_room(self, gradient: BucketGradient) -> bool:
        """Whether one more bucket may be on its way."""
        under_way = sum(other.layout.padded_numel for other in (*self._in_flight, *self._expected))
        return under_way + gradient.layout.padded_numel <= self._max_in_flight

    def _make_room(self, gradient: BucketGradient) -> None:
        """Finish the oldest reductions until one more bucket may be in flight."""
        needed = gradient.layout.padded_numel
        while self._in_flight and needed + sum(g.layout.padded_numel for g in self._in_flight) > self._max_in_flight:
            self._in_flight.popleft().finish_reduce(self.loss_scale)

    def _finish_reductions(self, *, wait: bool) -> None:
        while self._in_flight and (wait or self._in_flight[0].reduction_done):
            self._in_flight.popleft().finish_reduce(self.loss_scale)

    def end_backward(self) -> None:
        """The backward is over: close what unused parameters left open, and bring weights back to rest.

        Raises:
            EngineStateError: a trained parameter has been frozen behind the engine's back.
        """
        for _, gradient in self.trained:
            if self._open_segments[gradient]:
                require_still_trained(gradient)
        for weights, gradient in reversed(self.trained):
            if not self._open_segments[gradient]:
                continue
            for segment in gradient.segments:
                arrived = any(parameter.grad is not None for parameter in segment.parameters)
                if arrived or not (self.more_to_come or segment.holds_values):
                    gradient.fill(segment, more_to_come=self.more_to_come)
            self._open_segments[gradient].clear()
            self._gradient_done(weights, gradient)
        if self.frees_after_use:
            for bucket in self.buckets:
                self._rest(bucket)
        if not (self.more_to_come or self.plan.shards_optimizer):
            # A reduction that ends gathers its gradient. When it ends differs from rank to rank, but must not come
            # before a collective of the caller on one rank and behind it on another.
            self.finish_reductions()

    def finish_reductions(self) -> None:
        """Wait for all reductions under way."""
        self._finish_reductions(wait=True)

    def retire(self) -> None:
        """The buckets are to be cut anew: give the model its parameters back, complete or not."""
        for bucket in self.buckets:
            bucket.weights.uncover()

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step, also those of a backward that broke off, and come to rest.

        Waits for the reductions under way. All ranks have issued the same ones if they broke off at the same place.
        """
        self._clear_unmoved()
        self.finish_reductions()
        for gradient in self._expected:  # only what is sent to it ends a receive that is posted
            gradient.fill_rest()
            gradient.reduce()
            gradient.finish_reduce(self.loss_scale)
        self._expected.clear()
        for _, gradient in self.trained:
            gradient.drop()
        self.rest()

    def finish(self) -> None:
        """Wait for all that is under way."""
        self.drop_gradients()
        for bucket in self.buckets:
            bucket.weights.finish_gather()

    def _clear_unmoved(self) -> None:
        for _, gradient in self.trained:
            gradient.clear_unmoved()

    def rest(self) -> None:
        """The step is over: sharded parameters go to rest whatever was kept."""
        if self.plan.shards_parameters:
            for bucket in self.buckets:
                bucket.awaits_backward = False
                self._rest(bucket)
