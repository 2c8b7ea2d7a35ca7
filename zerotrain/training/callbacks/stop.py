"""Being told to stop from outside."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Those that let a run stop in order. Slurm sends SIGTERM, or another so long before a job's time is up; submitit asks
it for SIGUSR2."""
SAME_REQUEST_S = 1.0
"""Signals so soon after the first are the same request: Ctrl-C comes from the terminal, and from the launcher too."""


class StopRequest:
    """The first signal to stop is kept, and whoever is to know is told; a later one ends the running step at once."""

    def __init__(self, tell: Callable[[int], object] = lambda signum: None) -> None:
        self.signum = 0
        """The first signal that came; 0 for none."""
        self.at_once = False
        """Whether the running step was interrupted. Kept, since the interrupt may surface as another error: a broken
        collective, say."""
        self._tell, self._first_s, self._hopeless = tell, 0.0, False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        now_s = time.monotonic()
        if not self.signum:
            self.signum, self._first_s = signum, now_s
            self._hopeless |= self._tell(signum) is False
        is_another = now_s - self._first_s > SAME_REQUEST_S
        if not self.at_once and (is_another or self._hopeless):
            self.at_once = True
            raise KeyboardInterrupt(f"stopped at once by {signal.Signals(signum).name}")

    def give_up(self) -> None:
        """The next signal ends the running step, however soon it comes: no step can be ended in order any more."""
        self._hopeless = True


@contextmanager
def stop_requests(tell: Callable[[int], object] = lambda signum: None) -> Iterator[StopRequest]:
    """Inside, a signal to stop ends nothing by itself: a loop looks at the request when a step is done.

    Only the main thread can be told; in any other one nothing changes.

    Args:
        tell: told the number of the first signal, when it comes. If it returns False, nothing can be ended in order,
            and the signal interrupts as a second one does.
    """
    request = StopRequest(tell)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {signum: signal.signal(signum, request.on_signal) for signum in STOP_SIGNALS}
    try:
        yield request
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
