"""Exit codes."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COMPLETED = 0
FAILED = 1
CONFIG_PROBLEM = 2


def of_signal(signum: int) -> int:
    """What a shell shows for a command that a signal has ended: 130 for Ctrl-C."""
    return 128 + signal.Signals(signum).value


@contextmanager
def exits_raised() -> Iterator[None]:
    """Inside, `os._exit` called by this thread raises SystemExit: a model that called it ended a run with code 0 and
    without a word (2026-11-21). Processes forked inside, and other threads, end as they want."""
    end_process, here = os._exit, (os.getpid(), threading.get_ident())

    def _exit(status: int) -> None:
        if (os.getpid(), threading.get_ident()) != here:
            end_process(status)
        raise SystemExit(status)

    os._exit = _exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end_process
