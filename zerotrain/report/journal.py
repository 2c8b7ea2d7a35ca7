"""sweep.jsonl: the fate of each job of a sweep. A line is an event, which the process that runs the job appends
under the file's lock, so that all launchers, and several drivers of one folder, write one truth. Imports no torch.

A process that is killed leaves a job that has begun and not ended. A job's result.json counts more.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
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
"""In the error of a run that train.on_nonfinite has ended."""
_MAX_NBYTES = 2**20
"""Most bytes of a line: ours have 400. A longer line is read in parts and left out."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One line."""

    event: Annotated[str, untrusted.one_of(PLACED, BEGUN, ENDED, TAKEN, REFUSED)]
    """placed (its process has locked the folder, and checks its settings), begun, ended, taken (left as it is, with its
    status) or refused (for its settings)."""
    job: untrusted.Natural
    """Number of the job in the sweep that the driver runs."""
    folder: str
    """The job's, below that of the sweep."""
    hash: str | None
    """Equal where all settings are equal but those of `launch`, `checkpoint` and `sweep`; null of settings that could
    not be read. It is made before the data is read: that in result.json may differ."""
    overrides: list[str]
    """The job's own settings."""
    status: Annotated[str, untrusted.one_of(COMPLETED, DIVERGED, FAILED, STOPPED, RUNNING, PRUNED)] | None = None
    """Null of a job that has begun."""
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
        """Whether its folder lies below that of the sweep: no other is looked into."""
        return untrusted.is_kind(self.folder, untrusted.FilePath)

    def is_of(self, identity: "Identity") -> bool:
        """Whether it is about this job, whatever number it had."""
        return identity.hash is not None and identity == Identity.of_job(self.hash, self.overrides, identity.keys)


@dataclass(frozen=True)
class Identity:
    """Tells a job of a sweep from its others, and finds the same job in the next sweep."""

    hash: str | None
    keys: tuple[str, ...]
    """The settings that differ between the jobs and that the hash leaves out, such as `launch.nproc_per_node`."""
    values: tuple[str, ...]

    @classmethod
    def of_job(cls, config_hash: str | None, overrides: list[str], keys: tuple[str, ...]) -> "Identity":
        """The identity of a job by its settings."""
        return cls(
            config_hash, keys, tuple(sorted(override for override in overrides if override.partition("=")[0] in keys))
        )


def outcome(result: dict[str, Any], event_status: str | None = None) -> str:
    """The status of a job by its result.json: completed, pruned, diverged, failed or stopped.

    Args:
        said: diverged where there was an evaluation, whose loss may be no number.
    """
    from zerotrain.training.request import PRUNER, is_over  # imports torch, as those who ask have by now

    status, lost = str(result["status"]), result["final_val_loss"] is None
    if status == FAILED and _OF_TRAINING.search(result["error"] or ""):
        return DIVERGED
    if status == STOPPED and is_over(result["stopped_by"]):
        status = PRUNED if result["stopped_by"] == PRUNER else COMPLETED
    no_number = result["final_train_loss"] is None or (lost and event_status == DIVERGED)
    return DIVERGED if status == COMPLETED and no_number else status


class JournalError(ConfigError):
    """The journal cannot be written, so that no job of the sweep can be run."""


class Book:
    """The journal while it is locked."""

    def __init__(self, journal: "SweepJournal", file: BinaryIO) -> None:
        self._journal, self._file = journal, file

    def events(self) -> list[JobEvent]:
        """All that it says by now, also of jobs that are yet to begin."""
        return self._journal.events(placed=True)

    def append(self, event: JobEvent) -> None:
        """Add a line. A disk that is full keeps no job from running: its result.json says the same."""
        line = json.dumps(asdict(event)).encode() + b"\n"
        try:
            end = self._file.seek(0, os.SEEK_END)
            if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":  # of a process that was killed meanwhile
                line = b"\n" + line
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            print(f"warning: {self._journal.path} cannot be written: {error.strerror}", file=sys.stderr)


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
        """Held by the thread that reads on: of a driver two threads read."""

    @property
    def nbytes(self) -> int:
        """Its size by now."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @contextmanager
    def held(self) -> Iterator[Book]:
        """Lock it; inside nobody else writes. The lock goes with the process.

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
            yield Book(self, file)

    def append(self, event: JobEvent) -> None:
        """Lock it and add a line."""
        with self.held() as book:
            book.append(event)

    def events(self, start: int = 0, *, placed: bool = False) -> list[JobEvent]:
        """The events by now, in order; lines that are none of its own are left out.

        Args:
            start: bytes of it to leave out.
            placed: whether jobs that are yet to begin are told too.
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


def note_earlier_results(folder: Path) -> None:
    """Begin the journal of a sweep that has none with what lies in its folder."""
    from zerotrain.training.result import RESULT_NAME, read_result  # imports torch, as the jobs will

    events: list[JobEvent] = []
    for path in sorted(folder.rglob(RESULT_NAME)):
        with suppress(OSError, untrusted.UntrustedFileError):
            result = read_result(path)
            name = path.parent.relative_to(folder).as_posix()
            events.append(
                JobEvent(
                    event=ENDED,
                    job=int(name) if name.isdecimal() else len(events),
                    folder=name,
                    hash=result["config_hash"],
                    overrides=result["overrides"] or [],
                    status=result["status"],
                    error=result["error"],
                    final_val_loss=result["final_val_loss"],
                    time=path.stat().st_mtime,
                )
            )
    if events:
        with SweepJournal(folder).held() as book:
            for event in events if not book.events() else ():
                book.append(event)
