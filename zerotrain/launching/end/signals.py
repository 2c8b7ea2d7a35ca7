"""Signals to our processes, as far as that needs no torch."""

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zerotrain.launching.end import exits

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


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside, the first signal that is to end this process raises an exception where it works, KeyboardInterrupt for
    SIGINT and else SystemExit, so that nothing is left half done. Later ones are ignored: the process is about to end.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ends = [each for each, handler in before.items() if handler != signal.SIG_IGN]
    came = []

    def end(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(exits.of_signal(signum))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for each in ends:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ends if not came else ():
            signal.signal(each, before[each])
