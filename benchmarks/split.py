"""Where a step of a rank goes: the time of its parts, and what Python does for it. Measured in steps of their own."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from zerotrain.engine.model import forward

NUM_STEPS = 4
_EXPOSED = ("wait", "gather", "reduce", "norm of")
"""How the names of our engine's ranges begin in which the main thread sends, or waits for other ranks."""
_UPDATE = ("optimizer",)


class RangeClock:
    """The host's time in ranges, by action, without the ranges within each. For one thread."""

    def __init__(self) -> None:
        self.times_s: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def range(self, action: str) -> Iterator[None]:
        """Count what is done in here as this action's."""
        self._turn()
        self._open.append(action)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Another range begins to count: what has passed is the open one's."""
        now_s = time.perf_counter()
        if self._open:
            self.times_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


@contextmanager
def timed_ranges() -> Iterator[RangeClock]:
    """Let a clock count the ranges of all engines of this process."""
    ranges = RangeClock()
    former, forward.clock = forward.clock, ranges.range
    try:
        yield ranges
    finally:
        forward.clock = former


@dataclass(frozen=True, kw_only=True)
class Split:
    """Of a step of one rank on the CPU. The first four add up to its time; they are None for a peer, whose ranges we do
    not know."""

    compute_ms: float | None = None
    """Forward and backward, with the hooks of the engine."""
    exposed_ms: float | None = None
    """The main thread sends, or waits for other ranks."""
    update_ms: float | None = None
    """In the optimizer."""
    other_ms: float | None = None
    """Gradients are moved into buckets, averaged and squared, where the main thread does it."""
    threads_ms: float | None = None
    """CPU time of all other threads: transfers."""
    num_ops: float | None = None
    """Operations that the main thread dispatches."""
    num_calls: float | None = None
    """Functions of Python that the main thread calls."""


def split_of(step: Callable[[], object], *, has_ranges: bool) -> Split:
    """Measure some steps on the CPU. Collective.

    Args:
        has_ranges: whether the engine is ours.
    """
    with timed_ranges() as clock:
        started_s, cpu_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(NUM_STEPS):
            step()
        passed_s = time.perf_counter() - started_s
        threads_s = time.process_time() - cpu_s - (time.thread_time() - own_s)
    parts_s = {"exposed": 0.0, "update": 0.0, "other": 0.0}
    for action, time_s in clock.times_s.items():
        part = "exposed" if action.startswith(_EXPOSED) else "update" if action.startswith(_UPDATE) else "other"
        parts_s[part] += time_s
    in_ms = {name: 1e3 * time_s / NUM_STEPS for name, time_s in parts_s.items()}
    compute_ms = 1e3 * passed_s / NUM_STEPS - sum(in_ms.values())
    num_ops, num_calls = _counts(step)
    return Split(
        compute_ms=compute_ms if has_ranges else None,
        exposed_ms=in_ms["exposed"] if has_ranges else None,
        update_ms=in_ms["update"] if has_ranges else None,
        other_ms=in_ms["other"] if has_ranges else None,
        threads_ms=1e3 * threads_s / NUM_STEPS,
        num_ops=num_ops,
        num_calls=num_calls,
    )


def _counts(step: Callable[[], object]) -> tuple[int, int]:
    """(operations, calls) of a step each."""
    with _CountedOps() as ops:
        step()
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return ops.count, num_calls


class _CountedOps(TorchDispatchMode):
    """Counts what is dispatched in it, on this thread: so is a backward on the CPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
