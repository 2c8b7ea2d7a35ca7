"""The end of a run without further progress."""

import math
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from zerotrain.errors import ConfigError
from zerotrain.files import terminal, untrusted
from zerotrain.training.callback import Callback, Run
from zerotrain.training.report import say
from zerotrain.training.request import PRUNER, Request


class _StoppingState(TypedDict):
    best: float | None
    num_worse: untrusted.Natural


class EarlyStopping(Callback):
    """Asks for a stop when as many evaluations in a row as `patience` were not better than the best one before.

    Args:
        patience: evaluations.
        metric: of an evaluation, such as val_loss, val_accuracy, or val_loss/NAME of a source of a mix or of a
            further validation set. Lower is better, if the metric does not say otherwise; nan is never better.
        min_delta: what a better one is better by, at least.
    """

    def __init__(self, *, patience: int, metric: str = "val_loss", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}; it must be at least 1")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta}; it must be at least 0")
        self.metric, self._patience, self._min_delta = metric, patience, min_delta
        self._best: float | None = None
        self._num_worse = 0

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`."""
        if self.metric not in metrics:
            raise LookupError(f"metric={self.metric}: an evaluation has {', '.join(metrics)}")
        value = metrics[self.metric]
        badness = run.badness(self.metric, value)
        best = math.inf if self._best is None else run.badness(self.metric, self._best)
        if math.isfinite(value) and badness < best and badness <= best - self._min_delta:
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def ask(self, run: Run) -> Request | None:
        """See `Callback.ask`."""
        return Request(stop=True) if self._num_worse >= self._patience else None

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"best": self._best, "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        state = untrusted.require_kind(state, _StoppingState)
        self._best, self._num_worse = state["best"], state["num_worse"]


# The end of a job of a sweep, worse than the others by then: Optuna's pruner says so.


SQLITE = "sqlite:///"
_MAGIC = b"SQLite format 3\0"
_WAIT_S = 60
"""Seconds to wait for another writer of the file."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A job's place in a study of Optuna."""

    url: str
    """The address of the database."""
    study: str
    number: int
    metric: str
    """The number of an evaluation to compare."""
    pruner: dict[str, Any]
    """Its class and arguments."""


class Pruning(Callback):
    """Tells the study each evaluation, and asks for a stop where the pruner wants one; after the last step nobody
    asks. A study that cannot be reached ends nothing: the job goes on unpruned.

    Args:
        pruner: an object of `optuna.pruners`.
    """

    ranks = "first"

    def __init__(self, trial: Trial, pruner: Any) -> None:
        self._trial, self._pruner = trial, pruner
        self._storage: Any = None
        self._is_unwanted = self._has_failed = False

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`. The evaluation before the first step is the same in all jobs."""
        if self._has_failed or run.step == 0:
            return
        try:
            if self._trial.metric not in metrics:
                raise LookupError(f"an evaluation has no {self._trial.metric}; it has {', '.join(metrics)}")
            if math.isfinite(value := metrics[self._trial.metric]):
                self._is_unwanted = self._report(run.step, value)
        except Exception as error:  # of whatever database it is
            self._has_failed = True
            message = untrusted.printable(f"{type(error).__name__}: {error}".partition("\n")[0], keep="")
            say(run.console, f"warning: sweep.pruner: {message}; this job goes on unpruned")

    def ask(self, run: Run) -> Request | None:
        """See `Callback.ask`."""
        return Request(stop=PRUNER) if self._is_unwanted else None

    def _report(self, step: int, value: float) -> bool:
        """Tell the study a value, unless it has one of this step from before a restart; return whether the job is to
        end."""
        optuna = _optuna()
        if self._storage is None:
            self._storage = open_storage(self._trial.url)
        storage = self._storage
        study = optuna.load_study(study_name=self._trial.study, storage=storage, pruner=self._pruner)
        study_id = storage.get_study_id_from_name(self._trial.study)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self._trial.number)
        if step not in storage.get_trial(trial_id).intermediate_values:
            storage.set_trial_intermediate_value(trial_id, step, value)
        return bool(self._pruner.prune(study, storage.get_trial(trial_id)))


def open_storage(url: str) -> Any:
    """Optuna's storage at an address; a file of SQLite is made where there is none.

    Raises:
        ConfigError: it cannot be opened, or is none.
        ImportError: Optuna is not installed.
    """
    optuna = _optuna()
    is_file = url.startswith(SQLITE)
    if is_file:
        _require_sqlite(Path(url.removeprefix(SQLITE)))
    try:
        waiting = {"connect_args": {"timeout": _WAIT_S}} if is_file else None
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting)
    except Exception as error:  # of SQLAlchemy, of a driver of a database, of Optuna for a study of another version
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"hydra.sweeper.storage: got {without_password(url)}, which Optuna cannot open: {message}"
        ) from error


def without_password(url: str) -> str:
    """An address as it may be shown."""
    return re.sub(r"://([^/@]*?):[^/@]*@", r"://\1:***@", url)


def _require_sqlite(path: Path) -> None:
    """SQLite would wait for a FIFO, and fail with a page of text for anything else."""
    if not os.path.lexists(path):
        return
    try:
        with open(path, "rb", opener=untrusted.only_regular) as file:
            header = file.read(len(_MAGIC))
        problem = None if header in (b"", _MAGIC) else "it is no database of SQLite"
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=_WAIT_S, uri=True)) as database:
            tables = [] if problem else [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        if tables and "studies" not in tables:
            problem = f"it is a database of something else, with {untrusted.shown(tables[0])}"
    except OSError as error:
        problem = str(error.strerror)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second of a name that is no text
        problem = untrusted.printable(str(error))
    if problem is not None:
        raise ConfigError(
            f"hydra.sweeper.storage: got {path}, which cannot be read: {problem}; move it away, or give another "
            "hydra.sweep.dir"
        )


def _optuna() -> Any:
    optuna = terminal.package("optuna", extra="sweeps", needed_by="hydra/sweeper=optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
