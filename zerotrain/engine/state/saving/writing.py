"""The part of a save that goes on beside the training: each rank writes its file, and rank 0 gives the folder its name.

The collectives belong to the training. So the ranks leave each other notes: how far each has come, that one has failed,
how it ended.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import MAX_NBYTES
from zerotrain.checkpoint.tensor_file import Described, TensorFile
from zerotrain.comm.ledger import Notes
from zerotrain.engine.state.saving.snapshot import Snapshot
from zerotrain.engine.state.together import Told, joint, told
from zerotrain.errors import CheckpointError, CommError, ZeroTrainError
from zerotrain.files.untrusted import UntrustedFileError, read_json

LEFT = "nothing was saved, what was there before is as it was, and training can go on"
MAX_PAUSE_S = 0.25
"""Between two looks at the notes."""
_STOP, _END, _NUM_WRITTEN = "stop", "end", "written"


def description_name(rank: int) -> str:
    """Name of the file in which a rank tells rank 0 what it has written: too much for a note. Reading removes it."""
    return f"described-{rank:05d}.json"


class _EndedByOthersError(Exception):
    """Another rank has failed, and this one need not go on."""


@dataclass(eq=False, kw_only=True)
class Writing:
    """One rank's part, for a thread of its own."""

    path: Path
    """Path of the checkpoint."""
    folder: Path
    """Under which name it is written."""
    file: TensorFile
    snapshot: Snapshot
    notes: Notes
    rank: int
    num_ranks: int
    publish: Callable[[list[dict[str, Any]]], None]
    """On rank 0 gives it its name, from what each rank tells of its file."""
    remove: Callable[[], None]
    """On rank 0 removes what was written."""
    process_ends: threading.Event = field(default_factory=threading.Event)

    def run(self) -> tuple[Told | None, BaseException | None]:
        """Write and wait for the others. Returns why the save has failed, the same on all ranks, and what this rank
        itself has met."""
        error: BaseException | None = None
        try:
            self._write()
        except BaseException as each:
            error = each
        finally:
            self.snapshot.close()
        try:
            return self._settled(error), None if isinstance(error, _EndedByOthersError) else error
        except BaseException as each:  # the store is gone, and with it all word of the others
            self.remove()
            return self._joint([(self.rank, told(each))]), each

    def _write(self) -> None:
        for nbytes in self.file.write(self.folder, self.snapshot.chunks):
            self.notes.leave(str(self.rank), nbytes)
            if self.notes.read(_STOP) is not None:
                raise _EndedByOthersError
        self.snapshot.require_unwritten()
        if self.rank > 0:
            (self.folder / description_name(self.rank)).write_text(json.dumps(self.file.described()))

    def _settled(self, error: BaseException | None) -> Told | None:
        """Tell the others how it went here; return how it went for all."""
        mine = None if error is None or isinstance(error, _EndedByOthersError) else told(error)
        if mine is not None:
            self.notes.leave(_STOP, self.rank)
        self.notes.leave(f"error {self.rank}", [mine])
        self.notes.count(_NUM_WRITTEN, 1)
        if self.rank > 0:
            return self._await_end()
        failed = self._await_all()
        if not failed:
            try:
                self.publish([self._described_by(rank) for rank in range(self.num_ranks)])
            except Exception as each:
                failed = [(0, told(each))]
        end = None
        if failed:
            self.remove()
            end = self._joint(failed)
        with suppress(CommError):  # nobody is left to be told, and the checkpoint is there all the same
            self.notes.leave(_END, [end])
        return end

    def _await_all(self) -> list[tuple[int, Told]]:
        """On rank 0: wait until no rank writes any more. Returns those that have failed, and in what."""
        heard = {rank: _Heard(self.notes.timeout_s) for rank in range(1, self.num_ranks)}
        for number in self._moments():
            if self.notes.count(_NUM_WRITTEN) == self.num_ranks:
                break
            if self.process_ends.is_set():
                return [(0, told(ended()))]
            if number % 4 == 0:  # each look at each rank goes over the network
                self.notes.leave("0", f"waiting {number}")
                for rank, each in heard.items():
                    if each.is_silent(self.notes.read(str(rank))) and self.notes.read(f"error {rank}") is None:
                        self.notes.leave(_STOP, 0)
                        return [(rank, each.silence())]
        errors = {rank: self.notes.read(f"error {rank}")[0] for rank in range(self.num_ranks)}
        return [(rank, Told(*error)) for rank, error in errors.items() if error is not None]

    def _await_end(self) -> Told | None:
        """On all ranks but 0: learn from it how the save ended."""
        heard = _Heard(self.notes.timeout_s)
        for number in self._moments():
            if (end := self.notes.read(_END)) is not None:
                return None if end[0] is None else Told(*end[0])
            if self.process_ends.is_set():
                return self._joint([(self.rank, told(ended()))])
            if number % 4 == 0 and heard.is_silent(self.notes.read("0")):
                return self._joint([(0, heard.silence())])
        raise AssertionError

    def _described_by(self, rank: int) -> dict[str, Any]:
        if rank == 0:
            return self.file.described()
        path = self.folder / description_name(rank)
        try:
            described: dict[str, Any] = read_json(path, Described, max_nbytes=MAX_NBYTES)
        except UntrustedFileError as error:
            raise CheckpointError(f"{path} is not what rank {rank} has written: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing on the machine of rank 0: all machines of a run must reach one folder under this "
                "name"
            ) from None
        path.unlink()
        return described

    def _joint(self, failed: list[tuple[int, Told]]) -> Told:
        return joint(failed, self.num_ranks, doing=f"saving {self.path}", left=LEFT)

    def _moments(self) -> Iterator[int]:
        """Numbers of the looks at the notes: often at first, then four times a second."""
        pause_s, number = 0.002, 0
        while True:
            yield number
            self.process_ends.wait(pause_s)
            pause_s, number = min(1.3 * pause_s, MAX_PAUSE_S, self.notes.timeout_s / 20), number + 1


class _Heard:
    """When a rank has last said something new."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._said: Any = None
        self._at_s = time.monotonic()

    def is_silent(self, said: Any) -> bool:
        """Whether nothing new has come for too long."""
        if said != self._said:
            self._said, self._at_s = said, time.monotonic()
        return time.monotonic() - self._at_s > self._timeout_s

    def silence(self) -> Told:
        """The message about a rank that does not answer."""
        return told(
            CheckpointError(
                f"nothing was heard of it for {self._timeout_s:g} s: its process is gone, or its disk does not answer"
            )
        )


def ended() -> ZeroTrainError:
    """Why a save fails that is under way when its process ends."""
    return CheckpointError("its process ended before the save was done; call wait() on what engine.begin_save returns")
