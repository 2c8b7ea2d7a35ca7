"""sweep.jsonl: the fate of each job of a sweep. A line is an event. The process of the job appends it under
the file's lock: all launchers, and several drivers of one folder, write one truth. Imports no torch.

A killed process leaves a job begun and not ended. A job's result.json counts more.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from zerotrain.errors import ConfigError, TrainingError
from zerotrain.files import untrusted
from zerotrain.files.lock import lock, open_lock

JOURNAL_NAME = "sweep.jsonl"
COMPLETED, DIVERGED, FAILED, STOPPED, RUNNING = "completed", "diverged", "failed", "stopped", "running"
PRUNED = "pruned"
PLACED, BEGUN, ENDED, TAKEN, REFUSED = "placed", "begun", "ended", "taken", "refused"
_OF_TRAINING = re.compile(rf"(^| ){TrainingError.__name__}: ")
"""In the error of a run ended by train.on_nonfinite."""
_MAX_NBYTES = 2**20
"""Most bytes of a line: ours have 400. A longer line is read in parts and left out."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One line."""

    event: Annotated[str, untrusted.one_of(PLACED, BEGUN, ENDED, TAKEN, REFUSED)]
    """placed (its process has locked the folder, and checks its settings), begun, ended, taken (left as it is, with its
    status) or refused (for its settings)."""
    job: untrusted.Natural
    """Number of the job in the driver's sweep."""
    folder: str
    """The job's, from the sweep's folder on."""
    hash: str | None
    """Equal where all settings are equal but those of `launch`, `checkpoint` and `sweep`; null of settings that could
    not be read. It is made before the data is read: the hash in result.json may differ."""
    overrides: list[str]
    """The job's own settings."""
    status: Annotated[str, untrusted.one_of(COMPLETED, DIVERGED, FAILED, STOPPED, RUNNING, PRUNED)] | None = None
    """Null of a job just begun."""
    error: str | None = None
    final_val_loss: float | None = None
    value: float | list[float] | None = None
    """The sweep's objective; a list where it has several."""
    trackers: dict[str, str] = field(default_factory=dict)
    """The ids of an ended job's run at its trackers, by their names."""
    pid: untrusted.Natural = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the clock of `host`."""

    @property
    def is_within(self) -> bool:
        """Whether its folder lies in the sweep's: no other is looked into."""
        return untrusted.is_kind(self.folder, untrusted.FilePath)


def outcome(result: dict[str, Any], *, was_evaluated: bool = False) -> str:
    """The status of a job by its result.json: completed, pruned, diverged, failed or stopped.

    Args:
        was_evaluated: a validation loss of null is then no number. Otherwise there is none.
    """
    from zerotrain.training.request import PRUNER, is_over  # imports torch, as those who ask have by now

    status = str(result["status"])
    if status == FAILED and _OF_TRAINING.search(result["error"] or ""):
        return DIVERGED
    if status == STOPPED and is_over(result["stopped_by"]):
        status = PRUNED if result["stopped_by"] == PRUNER else COMPLETED
    has_val_loss = result["final_val_loss"] is not None or not was_evaluated
    has_losses = result["final_train_loss"] is not None and has_val_loss
    return DIVERGED if status == COMPLETED and not has_losses else status


class JournalError(ConfigError):
    """The journal cannot be written: no job of the sweep can be run."""


class SweepJournal:
    """The journal of a sweep.

    Args:
        folder: of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_NAME
        self._events: list[tuple[int, JobEvent]] = []
        """With the place in the file behind each."""
        self._num_read = 0
        self._reads = threading.Lock()
        """Held by the reading thread: of a driver two threads read."""

    @property
    def nbytes(self) -> int:
        """Its size by now."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @contextmanager
    def held(self) -> Iterator[Callable[[JobEvent], None]]:
        """Lock it; inside nobody else writes, and a function adds a line. The lock goes with the process.

        Raises:
            JournalError: it is no file that can be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open_lock(self.path)
        except (untrusted.NotRegularError, OSError) as error:
            raise JournalError(
                f"hydra.sweep.dir: got {self.path.parent}, whose {JOURNAL_NAME} cannot be written: {error.strerror}; "
                "move that away, or give another folder"
            ) from error
        with file:
            lock(file, wait=True)
            yield partial(self._append, file)

    def append(self, event: JobEvent) -> None:
        """Lock it and add a line."""
        with self.held() as append:
            append(event)

    def _append(self, file: BinaryIO, event: JobEvent) -> None:
        """Add a line. A full disk keeps no job from running: its result.json says the same."""
        line = json.dumps(asdict(event)).encode() + b"\n"
        try:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":  # of a process that was killed meanwhile
                line = b"\n" + line
            file.write(line)
            file.flush()
        except OSError as error:
            print(f"warning: {self.path} cannot be written: {error.strerror}", file=sys.stderr)

    def events(self, start: int = 0, *, placed: bool = False) -> list[JobEvent]:
        """The events by now, in order; lines of somebody else are left out.

        Args:
            start: bytes of it to leave out.
            placed: whether to tell of jobs yet to begin, too.
        """
        with self._reads:
            if self.nbytes < self._num_read:  # another file
                self._events, self._num_read = [], 0
            with suppress(OSError), open(self.path, "rb", opener=untrusted.only_regular) as file:
                file.seek(self._num_read)
                for line in iter(lambda: file.readline(_MAX_NBYTES), b""):
                    if not line.endswith(b"\n") and len(line) < _MAX_NBYTES:  # the rest is about to come
                        break
                    self._num_read += len(line)
                    with suppress(untrusted.UntrustedFileError):
                        self._events.append((self._num_read, untrusted.parse_json(line, JobEvent)))
            return [event for end, event in self._events if end > start and (placed or event.event != PLACED)]
