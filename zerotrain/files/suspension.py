"""The time for which this process was suspended: by SIGSTOP, as Slurm and terminals send it, or by a frozen cgroup."""

import threading
import time
from collections.abc import Callable

_BEAT_S = 0.5
_LEAST_S = 2.0
"""A busy machine lets a thread wait too."""
_MOST_CPU = 0.25
"""Of a suspension, for which the process computes. A thread also waits for code that keeps Python from running."""


class _Beats:
    """The pulse of this process, which whoever comes first takes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: tuple[float, float] | None = None
        """(time.monotonic(), time.process_time()) of the last beat; None before the first."""
        self.suspensions: list[tuple[float, float]] = []
        """(end by time.monotonic(), seconds) of each."""

    def beat(self) -> None:
        """Note a suspension since the last beat."""
        with self.lock:
            now = time.monotonic(), time.process_time()
            gap_s, cpu_s = (0.0, 0.0) if self.last is None else (now[0] - self.last[0], now[1] - self.last[1])
            self.last = now
            if gap_s >= _LEAST_S and cpu_s < _MOST_CPU * gap_s:
                self.suspensions.append((now[0], gap_s))


_beats = _Beats()


def watch_suspensions(tell: Callable[[float], object]) -> None:
    """From here on count the time for which this process is suspended.

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
    """Seconds for which this process was suspended since a time of `time.monotonic()`; 0 where nobody watches."""
    if _beats.last is None:
        return 0.0
    _beats.beat()
    return sum(seconds for end_s, seconds in _beats.suspensions if end_s > since_s)
