"""Optuna's study of a sweep: its file, how many trials it still has, and which of them a job is. Imports no torch
before a sweep has Optuna's sweeper.

The sweeper knows trials and Hydra numbers jobs; neither tells the other. So the sweeper gets a storage of ours, which
sees each trial as it is asked for, and turns what the sweeper makes of a pruned one into what Optuna calls it.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.lock import can_lock, lock, open_lock
from zerotrain.launching.sweep.journal import PRUNED, SweepJournal

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from zerotrain.launching.sweep.sweep import Sweep

STUDY_NAME = "study.db"
DRIVERS = ".drivers"
"""Folder of a lock for each driver, below that of the sweep: it tells whether a trial that runs has anybody left."""
_SWEEPER = "hydra_plugins.hydra_optuna_sweeper."
_DRIVER, _OBJECTIVES, _STARTS = "zerotrain.driver", "zerotrain.objective", "zerotrain.starts"
"""Attributes: of a trial the file of its driver's lock; of the study its objectives and how often it was begun."""
_GRID_PLACE = ("search_space", "grid_id")


class StudyError(ZeroTrainError):
    """The study has nothing to show."""


class StudyIsFullError(ZeroTrainError):
    """Another driver has asked for the last trials meanwhile: this one begins again with what is left."""


@dataclass(kw_only=True)
class Study:
    """The study that a sweep writes, as each process knows it that runs one of its jobs."""

    url: str
    name: str
    num_trials: int
    """In all."""
    trials: list[int] = field(default_factory=list)
    """The number of the trial that each job is, by the number that Hydra gives the job."""


def has_study(config: DictConfig) -> bool:
    """Whether a sweep has Optuna's sweeper.

    Args:
        config: as Hydra tells it to its callbacks, with `hydra`.
    """
    return str(config.hydra.sweeper.get("_target_", "")).startswith(_SWEEPER)


def begin_study(config: DictConfig, sweep: "Sweep") -> Study:
    """Open the study of a sweep, or make it, and let the sweeper use it: for the trials that it still has.

    Trials that run in no process any more wait again: with the same values, so that their jobs are found and go on.

    Args:
        config: as Hydra tells it to its callbacks; `hydra.sweeper` is filled.

    Raises:
        ConfigError: the study cannot be opened, or is one of something else.
        ImportError: Optuna is not installed.
    """
    import optuna

    from zerotrain.training.pruning import SQLITE, open_storage  # imports torch, as the jobs are about to

    logging.getLogger(_SWEEPER.rstrip(".")).setLevel(logging.CRITICAL)  # it tells of failed jobs, as we do
    sweeper, folder, journal = config.hydra.sweeper, sweep.folder, sweep.journal
    directions, objectives = list(sweep.directions), list(sweep.objectives)
    problems = list(_direction_problems(config, directions))
    if OmegaConf.is_config(sweeper.storage):
        problems.append("hydra.sweeper.storage: got an object; it must be a URL, or null for study.db")
    if problems:
        raise ConfigError(*problems)
    url = sweeper.storage or f"{SQLITE}{folder / STUDY_NAME}"
    name = sweeper.study_name or ("sweep" if sweeper.storage is None else str(folder))
    with journal.held():  # two drivers would make two studies
        storage = open_storage(url)
        try:
            study = optuna.load_study(study_name=name, storage=storage)
        except KeyError:
            study = optuna.create_study(study_name=name, storage=storage, directions=directions)
            study.set_user_attr(_OBJECTIVES, objectives)
        _require_same(study, url, directions, objectives)
        trials = study.get_trials(deepcopy=False)
        if trials and sweep.again == "all":
            raise ConfigError(
                f"sweep.again: got all, but the study {name} has {len(trials)} trials, which it keeps; give another "
                "hydra.sweeper.study_name, or another hydra.sweep.dir"
            )
        _held[:] = [_own_lock(folder)]
        for trial in trials:
            if trial.state.name == "RUNNING" and _is_left_alone(trial):
                _let_wait(storage, trial)
        starts = int(study.user_attrs.get(_STARTS, 0))
        study.set_user_attr(_STARTS, starts + 1)
        num_waiting = len([each for each in study.get_trials(deepcopy=False) if each.state.name == "WAITING"])
    given = copy.deepcopy(sweeper)

    def restore() -> None:
        with read_write(config.hydra):
            config.hydra.sweeper = given

    total = sweep.total or 0
    begun = Study(url=url, name=name, num_trials=total)
    with read_write(config.hydra), open_dict(config.hydra), flag_override(sweeper, "allow_objects", True):
        sweeper.storage = StudyStorage(begun, journal, storage, restore)  # of a `_target_` Hydra 1.4 makes none
        sweeper.study_name = name
        sweeper.n_trials = max(0, total - len(trials) + num_waiting)
        sweeper.direction = directions if len(directions) > 1 else directions[0]
        if sweeper.sampler.get("seed") is not None:  # or it would choose the same values again
            sweeper.sampler.seed += starts
    return begun


class StudyStorage:
    """The storage of the study that this process drives, as Optuna's sweeper gets it. All of it is Optuna's own but for
    what is here: `optuna.storages.BaseStorage` says what each method does."""

    def __init__(
        self, study: Study, journal: SweepJournal, storage: "BaseStorage", restore: Callable[[], None]
    ) -> None:
        self._study, self._journal, self._storage, self._restore = study, journal, storage, restore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StudyStorage":
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._study.url,)  # all that a process needs to know that runs a job

    def create_new_study(self, *arguments: Any) -> int:
        """Called once the sweeper has read its settings. From 1.4 on Hydra wants them as they were given."""
        self._restore()
        study_id: int = self._storage.create_new_study(*arguments)
        return study_id

    def create_new_trial(self, study_id: int, template_trial: "FrozenTrial | None" = None) -> int:
        """A trial, unless the study has all of them.

        Raises:
            StudyIsFullError: it has.
        """
        with self._journal.held():
            if self._storage.get_n_trials(study_id) >= self._study.num_trials:
                self._give_back(study_id)
                raise StudyIsFullError
            trial_id: int = self._storage.create_new_trial(study_id, template_trial)
            return self._asked(trial_id)

    def set_trial_state(self, trial_id: int, state: Any) -> bool:
        """Optuna 2 calls this."""
        return self._set_state(trial_id, state)

    def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> bool:
        """Optuna calls this from version 3 on."""
        return self._set_state(trial_id, state, values)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Optuna 2 gives a trial that has waited another place in its grid than the values that it has."""
        if key not in _GRID_PLACE or key not in self._storage.get_trial_system_attrs(trial_id):
            self._storage.set_trial_system_attr(trial_id, key, value)

    def get_best_trial(self, study_id: int) -> "FrozenTrial":
        """The best trial.

        Raises:
            StudyError: no trial has completed.
        """
        try:
            return self._storage.get_best_trial(study_id)
        except ValueError as error:
            raise StudyError("no trial of the study has completed, so that it has no best one") from error

    def _set_state(self, trial_id: int, state: Any, *values: Any) -> bool:
        set_state = getattr(self._storage, "set_trial_state_values" if values else "set_trial_state")
        if state.name == "RUNNING":
            with self._journal.held():
                is_ours = bool(set_state(trial_id, state, *values))
                if is_ours:
                    self._asked(trial_id)
                return is_ours
        if state.name == "COMPLETE" and self._was_pruned(trial_id):
            state = type(state).PRUNED
        return bool(set_state(trial_id, state, *values))

    def _asked(self, trial_id: int) -> int:
        """This driver is about to run the trial, as its next job."""
        self._storage.set_trial_user_attr(trial_id, _DRIVER, str(_held[0].name))
        self._study.trials.append(self._storage.get_trial(trial_id).number)
        return trial_id

    def _was_pruned(self, trial_id: int) -> bool:
        number = self._storage.get_trial(trial_id).number
        events = [event for event in self._journal.events() if event.job == number]
        return bool(events) and events[-1].status == PRUNED

    def _give_back(self, study_id: int) -> None:
        """Let those wait that this driver has asked for in vain: their jobs would have begun with this one."""
        for trial in self._storage.get_all_trials(study_id, deepcopy=False):
            if trial.state.name == "RUNNING" and trial.user_attrs.get(_DRIVER) == str(_held[0].name):
                _let_wait(self._storage, trial)


_held: list[BinaryIO] = []
"""The lock that says which process drives a study."""


def _direction_problems(config: DictConfig, directions: list[str]) -> Iterator[str]:
    given = config.hydra.sweeper.direction
    found = [getattr(each, "name", str(each)) for each in (given if OmegaConf.is_list(given) else [given])]
    is_default = found == ["minimize"] and not any(
        each.startswith("hydra.sweeper.direction=") for each in config.hydra.overrides.hydra
    )
    if found != directions and not is_default:
        wanted, has = ("[" + ",".join(each) + "]" if len(each) > 1 else each[0] for each in (found, directions))
        yield (
            f"hydra.sweeper.direction: got {wanted}, but sweep.direction={has}; give sweep.direction={wanted} and "
            "leave this one out"
        )


def _require_same(study: Any, url: str, directions: list[str], objectives: list[str]) -> None:
    """A ConfigError where a study is about something else: its trials would be compared with others."""
    from zerotrain.training.pruning import without_password

    found = [each.name.lower() for each in study.directions]
    asked = study.user_attrs.get(_OBJECTIVES, objectives)
    where = f"the study {study.study_name} in {without_password(url)} is to"
    if found != directions or asked != objectives:
        wants, has = (
            " and ".join(f"{direction} {name}" for direction, name in zip(*each, strict=False))
            for each in ((directions, objectives), (found, asked))
        )
        raise ConfigError(
            f"sweep.objective: got {wants}, but {where} {has}; give that, or another hydra.sweeper.study_name"
        )


def _let_wait(storage: Any, trial: Any) -> None:
    if hasattr(storage, "set_trial_state_values"):
        storage.set_trial_state_values(trial._trial_id, type(trial.state).WAITING)
    else:
        storage.set_trial_state(trial._trial_id, type(trial.state).WAITING)


def _own_lock(folder: Path) -> BinaryIO:
    """A lock of this process's own, until it ends. Those of processes that have ended go."""
    drivers = folder / DRIVERS
    drivers.mkdir(exist_ok=True)
    for path in drivers.iterdir():
        with suppress(OSError), open_lock(path, make=False) as file:
            if can_lock(file):
                path.unlink()
    own = open_lock(drivers / f"{os.getpid()}_{os.urandom(4).hex()}")
    lock(own)
    return own


def _is_left_alone(trial: Any) -> bool:
    """Whether the process that drove a trial has ended. False where nobody can tell: of a trial of another program, or
    on another machine."""
    path = Path(str(trial.user_attrs.get(_DRIVER, "")))
    return path.is_absolute() and path.parent.is_dir() and not path.exists()
