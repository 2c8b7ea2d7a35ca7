"""Handles a signal to stop: on a rank, and in the process that started the ranks."""

import _thread
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from zerotrain.files.terminal import say_at_once
from zerotrain.launching.end import exits
from zerotrain.launching.end.presence import read_states
from zerotrain.launching.end.signals import STOP_SIGNALS
from zerotrain.training.callbacks.stop import SAME_REQUEST_S, StopRequest

STOP_GRACE_S = 10.0
"""A rank that was told to stop at once has this long to write its result."""


def _stop_of_the_start(signum: int, frame: FrameType | None) -> None:
    """Does nothing: `stop_in_order` ends the process."""


def stop_in_order(note: Callable[[int, bool], bool], settle: Callable[[], None]) -> None:
    """From here on a signal to stop is noted when it comes. In the training loop, whose handlers keep the request, the
    first does no more; any other one ends the process within `STOP_GRACE_S`.

    Before the training SIGINT raises KeyboardInterrupt, and SIGTERM and SIGUSR1 end the process at once.

    Args:
        note: told the number of each signal to stop, when it comes, and whether this rank could end in order; returns
            whether all ranks can. The launcher, or torchrun, ends the others of a rank that is gone, by SIGTERM too.
        settle: called before the process is ended here.

    The limit is kept by a thread, which reads the interpreter's wake-up socket: the signal itself writes to it. Python
    runs its own handlers between two bytecodes, so never while a collective waits for ranks that are gone.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, _stop_of_the_start)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        obeyed_s: float | None = None
        with reader, writer:
            while True:
                signum = reader.recv(1)[0]
                if signum not in STOP_SIGNALS:
                    continue
                handler, now_s = signal.getsignal(signum), time.monotonic()
                request = getattr(handler, "__self__", None)
                is_same = obeyed_s is not None and now_s - obeyed_s <= SAME_REQUEST_S  # the training may be over by now
                if note(signum, is_same or (obeyed_s is None and isinstance(request, StopRequest))):
                    obeyed_s = obeyed_s or now_s
                    continue
                if isinstance(request, StopRequest) and not request.at_once:
                    request.give_up()
                    _thread.interrupt_main(signal.Signals(signum))
                if handler is not _stop_of_the_start:
                    time.sleep(STOP_GRACE_S)
                settle()
                os._exit(exits.of_signal(signum))

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


def pass_on(ranks_dir: Path, num_ranks: int, signum: int) -> bool:
    """Tell the ranks of this process, all of them at work, what it was told; each only once: one that the signal has
    come to by itself, as from a terminal, has noted it.

    Returns:
        Whether all of them are at work. If not, none was told.
    """
    ranks = [state for state, alive in read_states(ranks_dir) if alive]
    if len(ranks) < num_ranks:
        return False
    for state in ranks:
        if state.stopped_by is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(state.pid, signum)
    say_at_once(f"{signal.Signals(signum).name}: the running step ends, then the run; once more stops at once\n")
    return True
