"""ranks/<rank>.state: the state of a rank while it works, under a lock until its process ends. Imports no torch.

A rank may be gone without a word: it left no error, and under torchrun no other rank sees its exit code. Then the lock
of its state is free. A rank removes its state when its work is done.
"""

import json
import math
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from zerotrain.files.lock import can_lock, lock
from zerotrain.files.untrusted import Natural, one_of, only_regular, parse_json

_NUM_BYTES = 2**14
"""Size of the file's text, written at once: on a disk that is full later, a change needs no room. With 1 KiB a failure
with a path in Japanese, or the loss of 150 ranks, did not fit (2026-11-23)."""
_NUM_TEXT = 2**10
"""Largest length of each text in it, as JSON."""
_AGREED_S = 1.0
ALIVE = "alive"
"""Rank 0 touches this file in the run's folder while it works."""
_TOUCHED_EVERY_S = 1.0
_STEP_NUM_BYTES = 16
"""At the front, written in every step: 2 us."""


SignalName = Annotated[str, one_of(*signal.Signals.__members__)]


@dataclass(frozen=True)
class RankState:
    """One rank, as it has said itself."""

    rank: Natural
    phase: str
    """Its activity, such as "building the engine"."""
    step: int = 0
    """Step of the training; 0 before the first."""
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    host: str = ""
    stopped_by: SignalName | None = None
    """The signal that told it to stop."""
    stopped_s: float = 0.0
    """When that came, since the epoch, by the clock of the folder's file system."""
    in_order: bool = False
    """Whether the rank, told to stop, is about to end its step and the run in order."""
    gone: tuple[Natural, ...] = ()
    """The ranks that had ended before the signal came."""
    failed: str | None = None
    """The cause of its failure, if the disk had no room for a file with it."""
    suspended_s: float = 0.0
    """How long its process was suspended, the last time."""
    suspended_until_s: float = 0.0
    """When that ended, as `stopped_s`."""

    @property
    def last_seen(self) -> str:
        """Its last phase, and its step if the training has begun."""
        return f"{self.phase}, step {self.step}" if self.step else self.phase


class Presence:
    """This process's own state."""

    def __init__(self, ranks_dir: Path, rank: int) -> None:
        self._ranks_dir = ranks_dir
        self._state = RankState(rank, "starting", pid=os.getpid(), host=socket.gethostname())
        self._path = ranks_dir / f"{rank}.state"
        self._path.unlink(missing_ok=True)
        self._alive, self._touched_s = ranks_dir.parent / ALIVE, -math.inf
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._stop_noted, self._changing = threading.Event(), threading.Lock()
        self._change()
        self.begin(0)
        self._clock_error_s = clock_error(self._path)
        lock(self._descriptor)
        # A forked worker would keep the lock after the end of this process.
        os.register_at_fork(after_in_child=lambda: os.close(self._descriptor))

    def enter(self, phase: str) -> None:
        """Something else is done from here on."""
        self._change(phase=_short(phase))
        self._show_life()

    def begin(self, step: int) -> None:
        """A step of the training, counted from 1, begins."""
        os.pwrite(self._descriptor, b"%-*d" % (_STEP_NUM_BYTES, step), 0)
        self._show_life()

    def fail(self, cause: str) -> None:
        """Something went wrong, and could be written nowhere else."""
        self._change(failed=_short(cause))

    def note_suspension(self, seconds: float) -> None:
        """This process was suspended for so long until now."""
        self._change(suspended_s=seconds, suspended_until_s=time.time() + self._clock_error_s)

    def note_stop(self, signum: int, in_order: bool = False) -> bool:
        """A signal has told this rank to stop; the first counts.

        Args:
            in_order: whether this rank could end its step, and the run in order.

        Returns:
            Whether it can: not where another rank is gone, or the run's folder.
        """
        gone = tuple(state.rank for state, alive in read_states(self._ranks_dir) if not alive)
        in_order = in_order and not gone and self._path.exists()
        if self._state.stopped_by is None:
            name, now_s = signal.Signals(signum).name, time.time() + self._clock_error_s
            self._change(stopped_by=name, stopped_s=now_s, in_order=in_order, gone=gone)
        elif not in_order:
            self.note_interrupt()
        self._stop_noted.set()
        return in_order

    def note_interrupt(self) -> None:
        """The rank does not end in order any more, but at once."""
        self._change(in_order=False)

    def wait_for_note(self) -> None:
        """Wait until the thread that watches signals has noted the stop."""
        self._stop_noted.wait(timeout=1.0)

    def leave(self) -> None:
        """The work is done."""
        self._path.unlink(missing_ok=True)

    def _show_life(self) -> None:
        """On rank 0 touch `ALIVE`, for probes of others. Nothing else in its place is opened."""
        now_s = time.monotonic()
        if self._state.rank or now_s - self._touched_s < _TOUCHED_EVERY_S:
            return
        self._touched_s = now_s
        with suppress(OSError):  # a full disk, or the folder is gone: others tell that
            try:
                os.utime(self._alive, follow_symlinks=False)
            except FileNotFoundError:
                os.close(os.open(self._alive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))

    def _change(self, **changes: Any) -> None:
        with self._changing:  # threads note signals and suspensions
            self._state = replace(self._state, **changes)
            text = json.dumps(asdict(self._state)).ljust(_NUM_BYTES)
            os.pwrite(self._descriptor, text.encode(), _STEP_NUM_BYTES)


def _short(text: str) -> str:
    """The beginning of a text, as far as it has room."""
    text = text[:_NUM_TEXT]
    while len(json.dumps(text)) > _NUM_TEXT:
        text = text[:-1]
    return text


def read_states(ranks_dir: Path) -> list[tuple[RankState, bool]]:
    """The state of each rank with work left, and whether its process is there."""
    states = []
    for path in sorted(ranks_dir.glob("*.state")):
        try:
            with open(path, opener=only_regular) as file:
                step, state = int(file.read(_STEP_NUM_BYTES)), parse_json(file.read(_NUM_BYTES), RankState)
                # A shared lock is tried: two processes that look at once do not see each other.
                states.append((replace(state, step=step), not can_lock(file.fileno(), shared=True)))
        except (OSError, ValueError):  # its work is done, or it is about to write
            continue
    return states


def clock_error(path: Path) -> float:
    """Seconds to add to this machine's clock for that of a file system, shared by all machines of the run; 0 if they
    agree to a second. By the path of a file written just now.

    The clock of a machine was an hour late, and a consequence was taken for the first cause (2026-11-21).
    """
    error_s = path.stat().st_mtime - time.time()
    return error_s if abs(error_s) > _AGREED_S else 0.0


def continue_stopped(ranks_dir: Path) -> None:
    """Let suspended ranks of this machine go on, to be ended in order: a SIGTERM does not reach them before, and the
    launcher and torchrun wait for 30 s until they kill them (2026-11-21)."""
    for state, alive in read_states(ranks_dir):
        if alive and state.host == socket.gethostname() and state.pid > 0:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(state.pid, signal.SIGCONT)


def seen_alive(ranks_dir: Path, rank: int) -> dict[int, str]:
    """The other ranks whose processes are there, seen from this one, and where they are."""
    return {state.rank: state.last_seen for state, alive in read_states(ranks_dir) if alive and state.rank != rank}
