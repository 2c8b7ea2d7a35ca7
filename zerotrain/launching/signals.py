"""Signals to our processes, as far as that needs no torch."""

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Get this signal when the parent process dies, however it dies. Linux only: elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Put the signal handlers back at the end: torch's agent installs its own and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
