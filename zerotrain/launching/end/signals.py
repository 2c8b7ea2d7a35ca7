"""Signals to our processes, as far as that needs no torch."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zerotrain.launching.end import exits

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)


class Ended(BaseException):
    """A signal is to end this process."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def raised(*signums: signal.Signals) -> Iterator[None]:
    """Inside, these signals raise `Ended` in the main thread, but for those that this process ignores, as under nohup.
    Handlers are put back at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise Ended(signum)

    previous = {each: signal.getsignal(each) for each in signums}
    heeded = [each for each in signums if previous[each] != signal.SIG_IGN]
    for each in heeded:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in heeded:
            signal.signal(each, previous[each])


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
