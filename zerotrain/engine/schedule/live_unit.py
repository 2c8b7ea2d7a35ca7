"""A unit at run time: its modules, its buckets, those to gather ahead, and how far a backward has come through it.

[Note: positions in a backward]
Autograd numbers the nodes of a graph in the order they are made, and a backward runs them in the reverse of that order.
So a backward at node s has run all its nodes above s, and those of a forward with node f as its first are all done as
soon as s < f. A gradient missing by then will not come in this backward. Every rank
finds this at the same place of its backward, whatever gradients it has.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from zerotrain.engine.buckets.bucket import Bucket

BEHIND_ALL_NODES = 2**63


@dataclass(eq=False)
class UnitCall:
    """One forward of a unit. Hooks on its outputs hold it, so it lives as long as its graph."""

    first_node: int
    """Number of its first node, if it made any."""
    reached_in: int | None = None
    """Number of the last backward through it."""
    is_used_up: bool = False
    """Whether the graph is freed: no other backward can come through it."""


@dataclass(eq=False)
class LiveUnit:
    """A unit with the buckets it needs and those to gather ahead while it runs."""

    name: str
    modules: list[nn.Module]
    buckets: list[Bucket]
    ahead_in_forward: list[Bucket] = field(default_factory=list)
    ahead_in_backward: list[Bucket] = field(default_factory=list)
    fetched_in_forward: list[Bucket] = field(default_factory=list)
    """Behind those gathered ahead, what is gathered next: where shards lie off the device they are fetched by then."""
    fetched_in_backward: list[Bucket] = field(default_factory=list)
    first_of: list[Bucket] = field(default_factory=list)
    """Buckets without use in an earlier unit of the forward."""
    last_of: list[Bucket] = field(default_factory=list)
    """Buckets without use in a later unit of the forward."""
    calls_units: bool = False
    """Whether other units run within its forward, and so within its backward."""
    num_silent_calls: int = 0
    """Forwards since the last step that made no graph yet: a reentrant checkpoint makes it in the backward."""
    reached_in: int | None = None
    """Number of the last backward that came through a forward of it. Its `UnitCall` may be gone: the graph that a
    reentrant checkpoint makes ends with the checkpoint's own backward (seen: a linear unused on one rank in a
    checkpoint; its bucket was never closed there, and the ranks hung)."""
    calls: "weakref.WeakSet[UnitCall]" = field(default_factory=weakref.WeakSet)
    """Forwards since the last step whose graphs are alive."""
    _unseen_calls: list[UnitCall] = field(default_factory=list)
    """Calls with unseen outputs: no graph keeps them alive."""

    def add_call(self, call: UnitCall, *, is_held: bool) -> None:
        """A forward made a graph, of which hooks hold `call` if `is_held`."""
        self.calls.add(call)
        if not is_held:
            self._unseen_calls.append(call)

    def forget_calls(self) -> None:
        """The weights were updated: no backward may come through earlier forwards any more."""
        self.calls.clear()
        self._unseen_calls.clear()
        self.num_silent_calls = 0

    def is_passed(self, position: int, backward: int) -> bool:
        """Whether all gradients of the unit in the backward of this number have come, with that backward at node
        `position`."""
        announced = not self.num_silent_calls or self.reached_in == backward
        return announced and not self._entered(position, backward)

    def was_called(self, backward: int) -> bool:
        """Whether the backward of this number may still come through a forward."""
        return bool(self.num_silent_calls or self._entered(BEHIND_ALL_NODES, backward))

    def passes_next(self, position: int, backward: int) -> bool:
        """Whether the unit will be passed as soon as the backward, which has just reached it, comes to another unit."""
        entered = self._entered(position, backward)
        return len(entered) == 1 and entered[0].reached_in == backward and not self.calls_units

    def _entered(self, position: int, backward: int) -> list[UnitCall]:
        """The forwards that this backward may come through, and has begun to or passed by when it is at `position`."""
        return [
            call
            for call in self.calls
            if position >= call.first_node and (not call.is_used_up or call.reached_in == backward)
        ]


def next_buckets(unit: LiveUnit, following: Sequence[LiveUnit], prefetch: int) -> list[Bucket]:
    """The buckets of the next `prefetch` units with any that `unit` does not have."""
    ahead: list[Bucket] = []
    for other in following:
        new = [bucket for bucket in other.buckets if bucket not in unit.buckets and bucket not in ahead]
        if new and prefetch > 0:
            ahead += new
            prefetch -= 1
    return ahead
