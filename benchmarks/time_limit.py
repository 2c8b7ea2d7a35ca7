"""How long a benchmark may take as a whole."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimit:
    """Lets a run begin only if it should end in time, by how long it, or else the longest of all, took before.

    Args:
        limit_s: seconds from now on; None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self._start_s = time.monotonic()
        self._durations_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.limit_s - (time.monotonic() - self._start_s))

    @property
    def run_s(self) -> float:
        """Seconds the next run may take: half of what is left, so that one that hangs does not end all others; near
        the end twice as long as the longest, which is no sign of a hang."""
        return min(self.left_s, max(self.left_s / 2, 2 * self._longest_s))

    def has_room_for(self, name: str) -> bool:
        """Whether a run of this name should end in time."""
        return self.left_s > self._durations_s.get(name, self._longest_s)

    @property
    def _longest_s(self) -> float:
        return max(self._durations_s.values(), default=0.0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Around a run."""
        start_s = time.monotonic()
        yield
        self._durations_s[name] = time.monotonic() - start_s
