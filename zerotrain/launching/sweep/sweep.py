"""A sweep, for its driver and for each process of its jobs. Imports no torch."""

import copy
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from zerotrain.config.schema import SweepConfig
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.lock import can_lock, lock, open_lock
from zerotrain.report.journal import ENDED, FAILED, PRUNED, Identity, JobEvent, SweepJournal

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial


# Optuna's study of a sweep: its file, the number of trials left, and the trial of each job. Imports no torch before a
# sweep has Optuna's sweeper.
#
# The sweeper knows trials and Hydra numbers jobs; neither tells the other. So the sweeper gets a storage of ours. It
# sees each request for a trial, and turns the state that the sweeper gives to a pruned one into Optuna's own.


STUDY_NAME = "study.db"
DRIVERS = ".drivers"
"""Folder of a lock for each driver, below that of the sweep: it tells whether the driver of a running trial is
there."""
_SWEEPER = "hydra_plugins.hydra_optuna_sweeper."
_DRIVER, _DROPPED = "zerotrain.driver", "zerotrain.dropped"
"""Attributes of a trial: the file of its driver's lock; that it never was a job, and does not count."""
_OBJECTIVES, _STARTS = "zerotrain.objective", "zerotrain.starts"
"""Attributes of the study: its objectives, and how often it was begun."""
_GRID_PLACE = ("search_space", "grid_id")


class StudyError(ZeroTrainError):
    """The study has nothing to show."""


class StudyIsFullError(ZeroTrainError):
    """Another driver has asked for the last trials meanwhile: this one begins again with what is left."""


@dataclass(kw_only=True)
class Study:
    """The study of a sweep, for each process of its jobs."""

    url: str
    name: str
    num_trials: int
    """In all."""
    trials: list[int] = field(default_factory=list)
    """The number of the trial of each job, by Hydra's number of the job."""


def has_study(config: DictConfig) -> bool:
    """Whether a sweep has Optuna's sweeper.

    Args:
        config: as Hydra tells it to its callbacks, with `hydra`.
    """
    return str(config.hydra.sweeper.get("_target_", "")).startswith(_SWEEPER)


def begin_study(config: DictConfig, sweep: "Sweep") -> Study:
    """Open the study of a sweep, or make it, and let the sweeper use it: for the trials left.

    Trials without a process any more wait again: with the same values, so their jobs are found and go on.

    Args:
        config: as Hydra tells it to its callbacks; `hydra.sweeper` is filled until the sweeper has read it.

    Raises:
        ConfigError: the study cannot be opened, or is one of something else.
    """
    from zerotrain.training.callbacks.early_stopping import (  # imports torch, as the jobs are about to
        SQLITE,
        open_storage,
    )

    logging.getLogger(_SWEEPER.rstrip(".")).setLevel(logging.CRITICAL)  # it tells of failed jobs, as we do
    sweeper, folder, total = config.hydra.sweeper, sweep.folder, sweep.total or 0
    if problems := list(_problems(config, list(sweep.directions))):
        raise ConfigError(*problems)
    url = sweeper.storage or f"{SQLITE}{folder / STUDY_NAME}"
    begun = Study(
        url=url,
        name=sweeper.study_name or ("sweep" if sweeper.storage is None else str(folder)),
        num_trials=total,
    )
    is_open = bool(sweeper.get("custom_search_space") or sweeper.get("search_space"))
    # The settings chosen by Optuna; None: nobody knows them.
    names = None if is_open else {name.lstrip("+") for name in sweep.swept}
    with sweep.journal.held():  # two drivers would make two studies
        storage = open_storage(url)
        study = _open_study(storage, begun, sweep)
        _held[:] = [_own_lock(folder)]
        for trial in study.get_trials(deepcopy=False):
            if trial.state.name == "WAITING" or (trial.state.name == "RUNNING" and _is_left_alone(trial)):
                if names is None or {name.lstrip("+") for name in trial.params} <= names:
                    _set_state(storage, trial, "WAITING")
                else:  # misspelt before, or somebody else has written it into the file: it could name a class
                    storage.set_trial_user_attr(trial._trial_id, _DROPPED, True)
                    _set_state(storage, trial, "FAIL")
        starts = int(study.user_attrs.get(_STARTS, 0))
        study.set_user_attr(_STARTS, starts + 1)
        states = [trial.state.name for trial in _job_trials(storage, storage.get_study_id_from_name(begun.name))]
    num_left = max(0, total - len(states) + states.count("WAITING"))
    if not num_left:
        print(f"the study has its {len(states)} trials; a larger hydra.sweeper.n_trials asks for more")
    original = copy.deepcopy(sweeper)

    def restore() -> None:
        with read_write(config.hydra):
            config.hydra.sweeper = original

    with read_write(config.hydra), open_dict(config.hydra), flag_override(sweeper, "allow_objects", True):
        # As an object: Hydra 1.4 makes none of a `_target_` here.
        sweeper.storage = StudyStorage(begun, sweep.journal, storage, restore)
        sweeper.study_name, sweeper.n_trials = begun.name, num_left
        sweeper.direction = list(sweep.directions) if len(sweep.directions) > 1 else sweep.directions[0]
        if sweeper.sampler.get("seed") is not None:  # or it would choose the same values again
            sweeper.sampler.seed += starts
    return begun


class StudyStorage:
    """The storage of this process's study, for Optuna's sweeper. All of it is Optuna's own but for the methods here:
    `optuna.storages.BaseStorage` describes each."""

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
            if len(_job_trials(self._storage, study_id)) >= self._study.num_trials:
                # The trials that this driver has asked for in vain wait again: their jobs would have begun with this
                # one.
                for trial in self._storage.get_all_trials(study_id, deepcopy=False):
                    if trial.state.name == "RUNNING" and trial.user_attrs.get(_DRIVER) == str(_held[0].name):
                        _set_state(self._storage, trial, "WAITING")
                raise StudyIsFullError
            trial_id: int = self._storage.create_new_trial(study_id, template_trial)
            return self._note_job(trial_id)

    def set_trial_state(self, trial_id: int, state: Any) -> bool:
        """Optuna 2 calls this."""
        return self._set_state(trial_id, state)

    def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> bool:
        """Optuna calls this from version 3 on."""
        return self._set_state(trial_id, state, values)

    def set_trial_param(self, trial_id: int, param_name: str, *values: Any) -> None:
        """A trial gets the value of a setting.

        Raises:
            ConfigError: the study has it with values of another kind.
        """
        try:
            self._storage.set_trial_param(trial_id, param_name, *values)
        except ValueError as error:
            cause = str(error).rstrip(".")
            raise ConfigError(
                f"{param_name}: the study has other values for it ({cause}); give it those, another hydra.sweep.dir or "
                "another hydra.sweeper.study_name"
            ) from error

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Optuna 2 gives a trial that has waited another place in its grid than its values have."""
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
                    self._note_job(trial_id)
                return is_ours
        if state.name == "COMPLETE":
            number = self._storage.get_trial(trial_id).number
            events = [event for event in self._journal.events() if event.job == number]
            if events and events[-1].status == PRUNED:
                state = type(state).PRUNED
        return bool(set_state(trial_id, state, *values))

    def _note_job(self, trial_id: int) -> int:
        """This driver is about to run the trial, as its next job."""
        self._storage.set_trial_user_attr(trial_id, _DRIVER, str(_held[0].name))
        self._study.trials.append(self._storage.get_trial(trial_id).number)
        return trial_id


_held: list[BinaryIO] = []
"""The lock of this process as the driver of a study."""


def _problems(config: DictConfig, directions: list[str]) -> Iterator[str]:
    sweeper = config.hydra.sweeper
    values = sweeper.direction if OmegaConf.is_list(sweeper.direction) else [sweeper.direction]
    names = [getattr(value, "name", str(value)) for value in values]
    given_here = any(override.startswith("hydra.sweeper.direction=") for override in config.hydra.overrides.hydra)
    if names != directions and (given_here or names != ["minimize"]):
        got, has = ("[" + ",".join(group) + "]" if len(group) > 1 else group[0] for group in (names, directions))
        yield (
            f"hydra.sweeper.direction: got {got}, but sweep.direction={has}; give sweep.direction={got} and "
            "leave this one out"
        )
    if OmegaConf.is_config(sweeper.storage):
        yield "hydra.sweeper.storage: got an object; it must be a URL, or null for study.db"
    if "?" in config.hydra.sweep.dir and sweeper.storage is None:
        yield f"hydra.sweep.dir: got {config.hydra.sweep.dir}; no URL of {STUDY_NAME} can have a ?; give another"
    if sweeper.n_trials < 1:
        yield f"hydra.sweeper.n_trials: got {sweeper.n_trials}; it must be 1 or more"


def _open_study(storage: Any, begun: Study, sweep: "Sweep") -> Any:
    """The study of this name, made where there is none. A ConfigError where it is about something else: its trials
    would be compared with others."""
    import optuna

    from zerotrain.training.callbacks.early_stopping import without_password

    directions, objectives = list(sweep.directions), list(sweep.objectives)
    try:
        study = optuna.load_study(study_name=begun.name, storage=storage)
    except KeyError:
        study = optuna.create_study(study_name=begun.name, storage=storage, directions=directions)
        study.set_user_attr(_OBJECTIVES, objectives)
    study_directions = [direction.name.lower() for direction in study.directions]
    study_objectives = study.user_attrs.get(_OBJECTIVES, objectives)
    if study_directions != directions or study_objectives != objectives:
        wants, has = (
            " and ".join(f"{direction} {name}" for direction, name in zip(*pair, strict=False))
            for pair in ((directions, objectives), (study_directions, study_objectives))
        )
        raise ConfigError(
            f"sweep.objective: got {wants}, but the study {begun.name} in {without_password(begun.url)} is to {has}; "
            "give that, or another hydra.sweeper.study_name"
        )
    if sweep.again == "all" and (num_trials := len(study.get_trials(deepcopy=False))):
        raise ConfigError(
            f"sweep.again: got all, but the study {begun.name} has {num_trials} trials, which it keeps; give another "
            "hydra.sweeper.study_name, or another hydra.sweep.dir"
        )
    return study


def _job_trials(storage: Any, study_id: int) -> list[Any]:
    """The trials with a job."""
    trials = storage.get_all_trials(study_id, deepcopy=False)
    return [trial for trial in trials if _DROPPED not in trial.user_attrs]


def _set_state(storage: Any, trial: Any, name: str) -> None:
    set_state = getattr(storage, "set_trial_state_values", None) or storage.set_trial_state
    set_state(trial._trial_id, type(trial.state)[name])


def _own_lock(folder: Path) -> BinaryIO:
    """A lock of this process's own, until it ends. Locks of ended processes are removed."""
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
    """Whether the driver of a trial has ended. False if nobody can tell: a trial of another program, or on another
    machine."""
    path = Path(str(trial.user_attrs.get(_DRIVER, "")))
    return path.is_absolute() and path.parent.is_dir() and not path.exists()


MAX_JOBS = 100_000
"""More are a mistake; Hydra makes a list of all before the first begins."""
FEW = 4
"""The whole output of this many jobs is shown."""
_NOT_HASHED = ("launch.", "checkpoint.")
_BASIC = ("hydra._internal.core_plugins.basic_launcher.", "hydra._internal.core_plugins.basic_sweeper.")
_GRID = "optuna.samplers.GridSampler"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep, from the start of its driver to its end."""

    folder: Path
    start: int
    """Bytes of the journal before."""
    swept: tuple[str, ...] = ()
    """The settings with several values."""
    total: int | None = None
    """Jobs; None: nobody knows yet."""
    again: str = SweepConfig.again
    diverged: str = SweepConfig.diverged
    max_failures_in_a_row: int = SweepConfig.max_failures_in_a_row
    output: str | None = None
    waits: bool = False
    """Whether the sweeper needs the loss of a job in another process."""
    in_driver: bool = True
    """Whether the driver runs the jobs itself, one after the other."""
    num_at_once: int = 1
    """Jobs side by side on a machine, each with devices of its own; 1: each has all."""
    objectives: tuple[str, ...] = (SweepConfig.objective,)
    directions: tuple[str, ...] = (SweepConfig.direction,)
    """minimize or maximize, for each objective. The first objective tells the best job."""
    study: Study | None = None
    """The study, if Optuna chooses the jobs."""
    driver: tuple[int, str] = field(default_factory=lambda: (os.getpid(), socket.gethostname()))
    """Its process and machine."""
    begun_s: float = field(default_factory=time.time)

    @classmethod
    def from_config(cls, config: DictConfig) -> "Sweep":
        """The sweep that a driver is about to begin.

        Args:
            config: as Hydra tells it to its callbacks, with `hydra`.
        """
        folder, settings, sweeper = Path(config.hydra.sweep.dir).absolute(), settings_of(config), config.hydra.sweeper
        has_basic_launcher, has_basic_sweeper = (
            str(config.hydra[group].get("_target_", "")).startswith(_BASIC) for group in ("launcher", "sweeper")
        )
        swept = swept_in(config)
        total = None if swept is None else prod(map(_num_values, swept)) or None
        if not has_basic_sweeper:  # None where nobody knows
            is_grid = OmegaConf.select(sweeper, "sampler._target_") == _GRID
            num_trials = sweeper.get("n_trials")
            has_both = total is not None and num_trials is not None
            total = min(num_trials, total) if is_grid and has_both else num_trials
        num_jobs = settings.jobs or config.hydra.launcher.get("n_jobs") or 1
        return cls(
            folder=folder,
            start=SweepJournal(folder).nbytes,
            swept=tuple(override.get_key_element().lstrip("+") for override in swept or ()),
            total=total,
            again=settings.again,
            diverged=settings.diverged,
            max_failures_in_a_row=settings.max_failures_in_a_row,
            output=settings.output,
            objectives=tuple(settings.objectives),
            directions=tuple(settings.directions),
            waits=not has_basic_sweeper,
            in_driver=has_basic_launcher,
            num_at_once=num_jobs if num_jobs > 0 else os.cpu_count() or 1,
        )

    @cached_property
    def journal(self) -> SweepJournal:
        """The file of its events."""
        return SweepJournal(self.folder)

    @property
    def is_driven_here(self) -> bool:
        """Whether this process drives it."""
        return self.driver == (os.getpid(), socket.gethostname())

    @property
    def shows_all(self) -> bool:
        """Whether what its jobs print is shown."""
        return self.output == "full" or (self.output is None and self.total is not None and self.total <= FEW)

    def gives_up_after(self, events: list[JobEvent]) -> bool:
        """Whether it ends, since too many jobs have failed one after the other. A refused one tells nothing of the
        machine."""
        statuses = [event.status for event in events if event.event == ENDED][-self.max_failures_in_a_row :]
        return 0 < self.max_failures_in_a_row == statuses.count(FAILED)

    def events(self) -> list[JobEvent]:
        """The events of its jobs since it was begun."""
        return self.journal.events(self.start)

    def events_to_count(self) -> list[JobEvent]:
        """Those of its jobs: of a study also before it was begun, as the sweeper does not ask for them again."""
        return self.events() if self.study is None else self.journal.events()

    def value_of(self, event: JobEvent) -> float | None:
        """The first objective of a job; None where it is not known, or no number."""
        return event.final_val_loss if self.objectives[0] == SweepConfig.objective else event.value

    def varied(self, overrides: list[str]) -> list[str]:
        """The settings of a job varied by the sweep."""
        return [override for override in overrides if override.lstrip("+").partition("=")[0] in self.swept]

    def identity(self, config_hash: str | None, overrides: list[str]) -> Identity:
        """The settings by which one of its jobs differs from the others."""
        keys = tuple(key for key in self.swept if key.startswith(_NOT_HASHED))
        return Identity.of_job(config_hash, overrides, keys)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "journal"}


def settings_of(config: DictConfig) -> SweepConfig:
    """The settings of `sweep`, as given.

    Args:
        config: as Hydra tells it to its callbacks.
    """
    values = {setting.name: OmegaConf.select(config, f"sweep.{setting.name}") for setting in fields(SweepConfig)}
    plain: dict[str, Any] = {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in values.items()
    }
    return SweepConfig(**{name: value for name, value in plain.items() if value is not None})


def swept_in(config: DictConfig) -> list[Override] | None:
    """The settings with several values, the sweeper's own first; None if Hydra alone can tell."""
    overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    try:
        parsed = OverridesParser.create().parse_overrides([*params, *map(str, overrides)])  # type: ignore[arg-type]
    except HydraException:
        return None
    return [override for override in parsed if override.is_sweep_override()]


def _num_values(swept: Override) -> int:
    """The number of values of a setting, counted up to `MAX_JOBS`; 0 if they are not listed."""
    if not swept.is_discrete_sweep():
        return 0
    value = swept.value()
    values = value.range() if isinstance(value, RangeSweep) else swept.sweep_string_iterator()
    return sum(1 for _ in islice(values, MAX_JOBS + 1))
