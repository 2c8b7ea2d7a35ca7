"""The time of this process's suspensions: by SIGSTOP, as Slurm and terminals send it, or by a frozen cgroup."""

import math
import threading
import time
from collections.abc import Callable

_BEAT_S = 0.5
_LEAST_S = 2.0
"""A busy machine lets a thread wait too."""
_MOST_CPU = 0.25
"""The part of a suspension for which the process computes. A thread also waits for code that keeps Python from
running."""


class _Beats:
    """The pulse of this process. Any thread may take it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last_s = self.last_cpu_s = math.nan
        """time.monotonic() and time.process_time() of the last beat; NaN before the first."""
        self.suspensions: list[tuple[float, float]] = []
        """(end by time.monotonic(), seconds) of each."""

    def beat(self) -> None:
        """Note a suspension since the last beat."""
        with self.lock:
            time_s, cpu_s = time.monotonic(), time.process_time()
            gap_s = time_s - self.last_s
            if gap_s >= _LEAST_S and cpu_s - self.last_cpu_s < _MOST_CPU * gap_s:
                self.suspensions.append((time_s, gap_s))
            self.last_s, self.last_cpu_s = time_s, cpu_s


_beats = _Beats()


def watch_suspensions(tell: Callable[[float], object]) -> None:
    """From here on count the time of this process's suspensions.

    Args:
        tell: told the seconds of each suspension at its end, by a thread.
    """
    _beats.beat()

    def watch() -> None:
        num_told = len(_beats.suspensions)
        while True:
            time.sleep(_BEAT_S)
            _beats.beat()
            for _, seconds in _beats.suspensions[num_told:]:
                tell(seconds)
                num_told += 1

    threading.Thread(target=watch, name="suspensions", daemon=True).start()


def suspended_s(since_s: float) -> float:
    """Seconds of this process's suspensions since a time of `time.monotonic()`; 0 if nobody watches."""
    if math.isnan(_beats.last_s):
        return 0.0
    _beats.beat()
    return sum(seconds for end_s, seconds in _beats.suspensions if end_s > since_s)
