"""Being told to stop from outside."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether SIGTERM has come. Kept, since the interrupt may surface as another error: a broken collective, say."""

    def __init__(self) -> None:
        self.received = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: end the running step as Ctrl-C would."""
        self.received = True
        raise KeyboardInterrupt("stopped by SIGTERM")


@contextmanager
def interrupt_on_sigterm() -> Iterator[StopRequest]:
    """Inside, SIGTERM raises KeyboardInterrupt, so that a run can write its result before it ends.

    Only the main thread can be told; in any other one nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = signal.signal(signal.SIGTERM, request.on_signal)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, previous)
