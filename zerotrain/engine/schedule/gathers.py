"""Decides on buckets to gather ahead, to keep full or to free, as forward and backward go from unit to unit.

Gathers come in list order after the step (stages 1 and 2) or in the order of the calls of units (stage 3): the same
on every rank, as long as all ranks call the same units.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zerotrain.comm.handles import Relayed
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.buckets.life import Phase, WeightState
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.live_unit import LiveUnit, next_buckets


class Gathers:
    """Completes and frees the weights of buckets.

    Args:
        units, buckets: in forward order.
    """

    def __init__(self, units: Sequence[LiveUnit], buckets: Sequence[Bucket], options: EngineOptions) -> None:
        self.plan = options.plan
        self.frees_after_use = self.plan.shards_parameters and options.zero.reshard_after_forward
        """Whether a unit's parameters are freed behind its forward, and gathered anew for its backward."""
        self._units, self._buckets = units, buckets
        self._has_refreshes = any(bucket.weights.refresh is not None for bucket in buckets)
        self.gathers_updated = self._has_refreshes or (self.plan.shards_optimizer and not self.plan.shards_parameters)
        """Whether the gathers for a forward are issued behind the update."""
        self._relayed = [handle for bucket in buckets if isinstance(handle := bucket.weights.gather, Relayed)]
        self._running: list[tuple[LiveUnit, torch.nn.Module | None]] = []
        """The units with their forward under way, outermost first, and the module called; None for the whole model."""
        self._in_backward: LiveUnit | None = None
        """The last unit that a backward has reached."""
        self._prefetch = options.zero.prefetch if self.plan.shards_parameters else 0
        """Units to gather ahead."""
        self._look_ahead(self._prefetch)

    def _look_ahead(self, prefetch: int) -> None:
        """Fill in what each unit gathers ahead; units with all their buckets in common count as one."""
        for bucket in self._units[0].buckets + self._units[-1].buckets:
            bucket.stays_full = True
        for index, unit in enumerate(self._units):
            earlier, later = _needed_by(self._units[:index]), _needed_by(self._units[index + 1 :])
            unit.first_of = [bucket for bucket in unit.buckets if bucket not in earlier]
            unit.last_of = [bucket for bucket in unit.buckets if bucket not in later]
            following, preceding = self._units[index + 1 :], self._units[:index][::-1]
            unit.ahead_in_forward = next_buckets(unit, following, prefetch)
            unit.ahead_in_backward = next_buckets(unit, preceding, prefetch)
            if any(bucket.weights.home.moves for bucket in self._buckets):
                unit.fetched_in_forward = next_buckets(unit, following, prefetch + 1)[len(unit.ahead_in_forward) :]
                unit.fetched_in_backward = next_buckets(unit, preceding, prefetch + 1)[len(unit.ahead_in_backward) :]

    # ---- forward

    def before_forward(self, unit: LiveUnit, phase: Phase, module: torch.nn.Module | None = None) -> None:
        """Make the unit's parameters complete, and gather ahead. In a recomputation gather ahead backwards."""
        if self.frees_after_use and phase is Phase.FORWARD:
            if self._running:
                self._running[-1][0].calls_units = True
            self._running.append((unit, module))
        if phase is Phase.BACKWARD:
            self.complete(unit.buckets, unit.ahead_in_backward, unit.fetched_in_backward)
        else:
            self.complete(unit.buckets, unit.ahead_in_forward, unit.fetched_in_forward)

    def after_forward(self, unit: LiveUnit, phase: Phase, module: torch.nn.Module | None = None) -> None:
        """Free what no later unit needs, unless the backward needs it at once or is under way.

        Nor what a unit needs that called this one and goes on (seen: of two blocks in one bucket the first called the
        second and then read a weight on one rank alone; that rank gathered anew, and the ranks hung). The outer one may
        be this unit: a block that calls itself, or a head with layers.
        """
        if self.frees_after_use and phase is Phase.FORWARD:
            while self._running and self._running.pop() != (unit, module):
                pass  # ended by an exception that this one has caught
            for bucket in unit.last_of:
                if not (bucket.stays_full or any(bucket in outer.buckets for outer, _ in self._running)):
                    bucket.weights.reshard()

    def end_forward(self, *, backward_follows: bool) -> None:
        """The model returned: free what a call out of the usual order left full."""
        if not self.frees_after_use:
            return
        self._running.clear()
        for bucket in self._buckets:
            if not (backward_follows and bucket.stays_full):
                _rest([bucket])
            elif bucket.weights.is_full:
                bucket.awaits_backward = True

    # ---- backward

    def begin_backward(self) -> None:
        """Complete the buckets that the forward left full for its backward: another call may have freed them since."""
        self.complete([bucket for bucket in self._buckets if bucket.awaits_backward])
        self._in_backward = None

    def before_backward(self, unit: LiveUnit) -> None:
        """Make the unit's parameters complete for its backward, gather the unit before it, and free what the one behind
        it left full, with which the backward is done, and no earlier unit of the forward needs.

        Most are freed when their gradient is done. Frozen ones have none, and that of two forwards is not done before
        the backward of the second. (Seen: two blocks in one bucket, the one between them frozen. Freed behind the
        second, the bucket was gathered again for the first; not so on a rank that skipped the second. The ranks hung.)
        """
        finished, self._in_backward = self._in_backward, unit
        if self.frees_after_use and finished is not None and finished is not unit and not finished.calls_units:
            for bucket in finished.first_of:
                if not (bucket.stays_full or bucket in unit.buckets):
                    bucket.weights.reshard()
        self.complete(unit.buckets, unit.ahead_in_backward, unit.fetched_in_backward)

    def skipped_before(self, unit: LiveUnit, backward: int) -> Iterator[tuple[LiveUnit, set[LiveUnit]]]:
        """The units without a call on this rank, between this backward and `unit`; each with those behind.

        At each of them a rank that did call it closes what is behind and gathers ahead, and so must this one, in that
        order. (Seen without overlap: one rank skipped a block, and waited with the reduction of that block for a rank
        that waited for the gather of the block before it.) No more than are gathered ahead anyway: ranks that jump
        further may all call few units.
        """
        index = self._units.index(unit)
        end = len(self._units) if self._in_backward is None else self._units.index(self._in_backward)
        skipped = self._units[index + 1 : end]
        if not skipped or len(skipped) > self._prefetch or any(other.was_called(backward) for other in skipped):
            return
        for place in range(end - 1, index, -1):
            yield self._units[place], set(self._units[place + 1 :])

    def gather_ahead(self, unit: LiveUnit) -> None:
        """A backward passes by a unit without a call on this rank."""
        if self.frees_after_use:
            self.complete([], unit.ahead_in_backward, unit.fetched_in_backward)

    def gradient_done(self, bucket: Bucket) -> None:
        """The backward has no more use for a bucket's parameters."""
        if self.frees_after_use:
            bucket.weights.reshard()

    def end_backward(self) -> None:
        """The backward is over."""
        if self.frees_after_use:
            _rest(self._buckets)

    # ---- the update

    def prepare_updated(self, buckets: Sequence[Bucket]) -> None:
        """These buckets are about to be updated: where their gathers follow at once, be ready to receive them."""
        if self.gathers_updated:
            for bucket in buckets:
                bucket.weights.prepare_gather()

    def gather_updated(self, bucket: Bucket) -> None:
        """This bucket was updated: issue the gather for the next forward."""
        if not self.gathers_updated:
            return
        if (refresh := bucket.weights.refresh) is None:
            bucket.weights.start_gather()
        elif not bucket.weights.home.moves:
            refresh.issue()

    # ---- at any time

    def complete(self, buckets: Sequence[Bucket], ahead: Sequence[Bucket] = (), fetched: Sequence[Bucket] = ()) -> None:
        """Gather `buckets` and wait for them; issue the gathers of `ahead` before the wait, so that they run while the
        unit computes, and right behind its own. Begin to fetch the shards of `fetched` from where they lie."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # torch.func refuses that what it transforms writes to memory it does not know, and a gather does (seen:
            # `jacrev` and `jvp` over units at stage 3).
            with temporarily_clear_interpreter_stack():
                self.complete(buckets, ahead, fetched)
            return
        for bucket in (*buckets, *ahead):
            if bucket.weights.life.state is WeightState.SHARD:
                bucket.weights.start_gather()
        for bucket in fetched:
            bucket.weights.fetch_shard()
        for bucket in buckets:
            if bucket.weights.life.state is WeightState.GATHERING:
                bucket.weights.finish_gather()

    def settle(self) -> None:
        """A graph begins, which can wait for no gather from before it: have weights where a step begins with them."""
        self.rest()
        if not self.plan.shards_parameters:
            self.complete(self._buckets)

    def rest(self) -> None:
        """The step is over: sharded parameters go to rest whatever was kept. Gathers of others along two axes begin
        their second: a rank may wait for them alone, as where it reads a weight between two steps."""
        if self.plan.shards_parameters:
            for bucket in self._buckets:
                bucket.awaits_backward = False
            _rest(self._buckets)
        for gather in self._relayed:
            gather.pass_on()

    def free(self) -> None:
        """The step is given up: as `rest`, but a forward before it may still have its backward. A loop for torch calls
        zero_grad between the two."""
        if self.plan.shards_parameters:
            _rest(self._buckets)


def _needed_by(units: Sequence[LiveUnit]) -> set[Bucket]:
    return {bucket for unit in units for bucket in unit.buckets}


def _rest(buckets: Iterable[Bucket]) -> None:
    """Reshard, also buckets gathered ahead and not used."""
    for bucket in buckets:
        if bucket.weights.life.state is not WeightState.SHARD:
            bucket.weights.finish_gather()
            bucket.weights.reshard()
