"""A run at an experiment tracker."""

import json
import os
import re
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from zerotrain.files.lock import whole
from zerotrain.files.untrusted import UntrustedFileError, parse_json, read_json, require_kind, shown
from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Curves, Written

MAX_NBYTES = 4096
"""Largest note that is read."""
NAMES = ("wandb",)
"""Each has a note NAME.json in the run's folder."""
SWEEP_VARIABLE = "ZEROTRAIN_SWEEP_JOB"
"""Variable of the environment in which the ranks of a sweep's job find its group and its name, as JSON."""


class _SweepJob(TypedDict):
    group: str
    name: str


class _Id(TypedDict):
    id: str


class _TrackerNote(TypedDict):
    id: str
    config_hash: str | None


class _TrackerState(TypedDict):
    note: _TrackerNote | None


def of_sweep(key: str) -> str | None:
    """The `group` or the `name` that the run has as a job of a sweep; None where it is none, or has no name there."""
    with suppress(UntrustedFileError):
        said = parse_json(os.environ.get(SWEEP_VARIABLE, "{}"), _SweepJob)
        return str(said[key]) or None
    return None


def ids_in(folder: Path) -> dict[str, str]:
    """The ids of a run at its trackers, by their names, as its folder has them."""
    found = {}
    for name in NAMES:
        with suppress(OSError, UntrustedFileError):
            found[name] = str(read_json(folder / f"{name}.json", _Id, max_nbytes=MAX_NBYTES)["id"])
    return found


class Tracker(Curves):
    """Sends curves to an experiment tracker.

    A run is one there, with one id, however often it is killed, stopped or restarted here: its checkpoints keep the id,
    and so does a note in its folder. It comes to the same numbers again, so that points which are there stay. A run of
    other settings comes to others: if the tracker has points that it has not come to, it is a new one there.
    """

    id_pattern: ClassVar[str] = ""
    """A regular expression that ids match."""

    def __init__(self) -> None:
        super().__init__()
        self._note: dict[str, Any] | None = None
        """The id there, and the hash of the settings, of which others compute another run."""

    @abstractmethod
    def _open_run(self, run: Run, run_id: str | None) -> tuple[str, Written]:
        """Open the run of an id, or a new one for None; return its id, and what is there."""

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"note": self._note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        note = require_kind(state, _TrackerState)["note"]
        self._note = None if note is None else self._checked(note)

    def _open(self, run: Run) -> Written:
        path, config_hash = run.folder / f"{self.package}.json", run.result.config_hash
        notes = [note for note in (self._note, self._read(path)) if note is not None]
        known = next((note for note in notes if note["config_hash"] == config_hash), None)
        run_id = known["id"] if known else notes[0]["id"] if notes and run.step else None
        run_id, written = self._open_run(run, run_id)
        if not known and written.last > run.step:
            self._close_run({}, None)
            run_id, written = self._open_run(run, None)
        self._note = {"id": run_id, "config_hash": config_hash}
        with whole(path) as file:
            file.write((json.dumps(self._note) + "\n").encode())
        return written

    def _read(self, path: Path) -> dict[str, Any] | None:
        """The note of an earlier sitting in the run's folder; None where there is none that can be read."""
        try:
            return self._checked(read_json(path, _TrackerNote, max_nbytes=MAX_NBYTES))
        except (OSError, UntrustedFileError):
            return None

    def _checked(self, note: dict[str, Any]) -> dict[str, Any]:
        """A note with an id as this tracker makes them."""
        if not re.fullmatch(self.id_pattern, note["id"]):
            raise UntrustedFileError(f"note.id: got {shown(note['id'])}; it must be an id of {self.package}")
        return note
