"""Exit codes of our processes, and signals to them. Needs no torch."""

import atexit
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from zerotrain.errors import ConfigError

# Exit codes.


COMPLETED = 0
FAILED = 1
CONFIG_PROBLEM = 2
DOES_NOT_FIT = 3
"""A plan ends so if its stage needs more memory than there is."""
STOPPED = 85
"""A run in a job of a scheduler ends so after a signal has stopped it in order, saved: it is to be tried again."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
_OF_DISK = (*NO_ROOM, errno.EFBIG, errno.EIO)


def of_error(error: BaseException) -> int:
    """The exit code of a command after this error: the user has given an impossible value, unless a disk is full or
    broken."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return FAILED if isinstance(cause, OSError) and cause.errno in _OF_DISK else CONFIG_PROBLEM


def of_failure(error: BaseException | None) -> int:
    """The exit code of a run that an error has ended: nobody tries again where a setting was refused."""
    return CONFIG_PROBLEM if isinstance(error, ConfigError) else FAILED


def of_signal(signum: int) -> int:
    """A shell's exit code for a command that a signal has ended: 130 for Ctrl-C."""
    return 128 + signal.Signals(signum).value


@contextmanager
def exits_raised() -> Iterator[None]:
    """Inside, `os._exit` called by this thread raises SystemExit: a model called it, and ended a run with code 0 and
    without a word (2026-11-21). Processes forked inside, and other threads, end as they want."""
    end_process, caller = os._exit, (os.getpid(), threading.get_ident())

    def _exit(status: int) -> None:
        if (os.getpid(), threading.get_ident()) != caller:
            end_process(status)
        raise SystemExit(status)

    os._exit = _exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end_process


def end_as_python(code: int) -> NoReturn:
    """End a fork as Python ends, since its callers are those of another process: wait for threads, call the functions
    registered at exit, write out all output."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside, the first signal to end this process raises an exception in its main thread, KeyboardInterrupt for SIGINT
    and else SystemExit: nothing is left half done. Later ones are ignored: the process is about to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [signum for signum, handler in previous.items() if handler != signal.SIG_IGN]
    has_come = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        for other in heeded:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(of_signal(signum))

    for signum in heeded:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in () if has_come else heeded:
            signal.signal(signum, previous[signum])
