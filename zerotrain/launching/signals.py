"""How a process of ours ends when it is told to, or when the process that started it is gone."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from zerotrain.launching import exits

STOP_GRACE_S = 10.0
"""A rank that was told to stop has this long to write its result."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Get this signal when the parent process dies, however it dies. Linux only: elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


def _stop_of_the_start(signum: int, frame: FrameType | None) -> None:
    """Does nothing: `stop_in_order` ends the process."""


def stop_in_order(note: Callable[[int], None], settle: Callable[[], None]) -> None:
    """From here on SIGINT raises KeyboardInterrupt; after any signal to stop, the process lasts `STOP_GRACE_S` at most.

    SIGTERM, until there is a handler that raises, ends the process at once.

    Args:
        note: told the number of each signal to stop, when it comes.
        settle: called before the process is ended here.

    The limit is kept by a thread, which reads the interpreter's wake-up socket: the signal itself writes to it. Python
    runs its own handlers between two bytecodes, so never while a collective waits for ranks that are gone.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _stop_of_the_start)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with reader, writer:
            while True:
                signum = reader.recv(1)[0]
                if signum in STOP_SIGNALS:
                    note(signum)
                    if signal.getsignal(signum) is not _stop_of_the_start:
                        time.sleep(STOP_GRACE_S)
                    settle()
                    os._exit(exits.of_signal(signum))

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


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
