"""A sweep as its driver has begun it, and as each process knows it that runs one of its jobs. Imports no torch."""

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


# Optuna's study of a sweep: its file, how many trials it still has, and which of them a job is. Imports no torch
# before a sweep has Optuna's sweeper.
#
# The sweeper knows trials and Hydra numbers jobs; neither tells the other. So the sweeper gets a storage of ours,
# which sees each trial as it is asked for, and turns what the sweeper makes of a pruned one into what Optuna calls
# it.


STUDY_NAME = "study.db"
DRIVERS = ".drivers"
"""Folder of a lock for each driver, below that of the sweep: it tells whether a trial that runs has anybody left."""
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
    names = None if is_open else {each.lstrip("+") for each in sweep.swept}
    with sweep.journal.held():  # two drivers would make two studies
        storage = open_storage(url)
        study = _opened(storage, begun, sweep)
        _held[:] = [_own_lock(folder)]
        for trial in study.get_trials(deepcopy=False):
            if trial.state.name == "WAITING" or (trial.state.name == "RUNNING" and _is_left_alone(trial)):
                _take_up(storage, trial, names)
        starts = int(study.user_attrs.get(_STARTS, 0))
        study.set_user_attr(_STARTS, starts + 1)
        states = [each.state.name for each in _counted(storage, storage.get_study_id_from_name(begun.name))]
    num_left = max(0, total - len(states) + states.count("WAITING"))
    if not num_left:
        print(f"the study has its {len(states)} trials; a larger hydra.sweeper.n_trials asks for more")
    given = copy.deepcopy(sweeper)

    def restore() -> None:
        with read_write(config.hydra):
            config.hydra.sweeper = given

    with read_write(config.hydra), open_dict(config.hydra), flag_override(sweeper, "allow_objects", True):
        # As an object: Hydra 1.4 makes none of a `_target_` here.
        sweeper.storage = StudyStorage(begun, sweep.journal, storage, restore)
        sweeper.study_name, sweeper.n_trials = begun.name, num_left
        sweeper.direction = list(sweep.directions) if len(sweep.directions) > 1 else sweep.directions[0]
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
            if len(_counted(self._storage, study_id)) >= self._study.num_trials:
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

    def set_trial_param(self, trial_id: int, param_name: str, *values: Any) -> None:
        """A trial gets the value of a setting.

        Raises:
            ConfigError: the study has it with values of another kind.
        """
        try:
            self._storage.set_trial_param(trial_id, param_name, *values)
        except ValueError as error:
            said = str(error).rstrip(".")
            raise ConfigError(
                f"{param_name}: the study has other values for it ({said}); give it those, another hydra.sweep.dir or "
                "another hydra.sweeper.study_name"
            ) from error

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
                _set_state(self._storage, trial, "WAITING")


_held: list[BinaryIO] = []
"""The lock that says which process drives a study."""


def _problems(config: DictConfig, directions: list[str]) -> Iterator[str]:
    sweeper = config.hydra.sweeper
    given = sweeper.direction if OmegaConf.is_list(sweeper.direction) else [sweeper.direction]
    found = [getattr(each, "name", str(each)) for each in given]
    given_here = any(each.startswith("hydra.sweeper.direction=") for each in config.hydra.overrides.hydra)
    if found != directions and (given_here or found != ["minimize"]):
        wanted, has = ("[" + ",".join(each) + "]" if len(each) > 1 else each[0] for each in (found, directions))
        yield (
            f"hydra.sweeper.direction: got {wanted}, but sweep.direction={has}; give sweep.direction={wanted} and "
            "leave this one out"
        )
    if OmegaConf.is_config(sweeper.storage):
        yield "hydra.sweeper.storage: got an object; it must be a URL, or null for study.db"
    if "?" in config.hydra.sweep.dir and sweeper.storage is None:
        yield f"hydra.sweep.dir: got {config.hydra.sweep.dir}; no URL of {STUDY_NAME} can have a ?; give another"
    if sweeper.n_trials < 1:
        yield f"hydra.sweeper.n_trials: got {sweeper.n_trials}; it must be 1 or more"


def _opened(storage: Any, wanted: Study, sweep: "Sweep") -> Any:
    """The study of this name, made where there is none. A ConfigError where it is about something else: its trials
    would be compared with others."""
    import optuna

    from zerotrain.training.callbacks.early_stopping import without_password

    directions, objectives = list(sweep.directions), list(sweep.objectives)
    try:
        study = optuna.load_study(study_name=wanted.name, storage=storage)
    except KeyError:
        study = optuna.create_study(study_name=wanted.name, storage=storage, directions=directions)
        study.set_user_attr(_OBJECTIVES, objectives)
    found = [each.name.lower() for each in study.directions]
    asked = study.user_attrs.get(_OBJECTIVES, objectives)
    if found != directions or asked != objectives:
        wants, has = (
            " and ".join(f"{direction} {name}" for direction, name in zip(*each, strict=False))
            for each in ((directions, objectives), (found, asked))
        )
        raise ConfigError(
            f"sweep.objective: got {wants}, but the study {wanted.name} in {without_password(wanted.url)} is to {has}; "
            "give that, or another hydra.sweeper.study_name"
        )
    if sweep.again == "all" and (num_trials := len(study.get_trials(deepcopy=False))):
        raise ConfigError(
            f"sweep.again: got all, but the study {wanted.name} has {num_trials} trials, which it keeps; give another "
            "hydra.sweeper.study_name, or another hydra.sweep.dir"
        )
    return study


def _counted(storage: Any, study_id: int) -> list[Any]:
    """The trials that are jobs."""
    trials = storage.get_all_trials(study_id, deepcopy=False)
    return [trial for trial in trials if _DROPPED not in trial.user_attrs]


def _take_up(storage: Any, trial: Any, names: set[str] | None) -> None:
    """Let a trial wait, or drop it where it has a setting that the sweep does not vary: it was misspelt before, or
    somebody else has written it into the file, and it could name a class.

    Args:
        names: of the settings that Optuna chooses; None: nobody knows them.
    """
    if names is None or {each.lstrip("+") for each in trial.params} <= names:
        _set_state(storage, trial, "WAITING")
    else:
        storage.set_trial_user_attr(trial._trial_id, _DROPPED, True)
        _set_state(storage, trial, "FAIL")


def _set_state(storage: Any, trial: Any, name: str) -> None:
    set_state = getattr(storage, "set_trial_state_values", None) or storage.set_trial_state
    set_state(trial._trial_id, type(trial.state)[name])


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


MAX_JOBS = 100_000
"""More are a mistake; Hydra makes a list of all before the first begins."""
FEW = 4
"""Jobs of which all that they print is shown."""
_NOT_HASHED = ("launch.", "checkpoint.")
_BASIC = ("hydra._internal.core_plugins.basic_launcher.", "hydra._internal.core_plugins.basic_sweeper.")
_GRID = "optuna.samplers.GridSampler"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep, from the start of its driver to its end."""

    folder: Path
    start: int
    """Bytes that the journal had before."""
    swept: tuple[str, ...] = ()
    """The settings that have several values."""
    total: int | None = None
    """Jobs; None: nobody knows yet."""
    again: str = SweepConfig.again
    diverged: str = SweepConfig.diverged
    max_failures_in_a_row: int = SweepConfig.max_failures_in_a_row
    output: str | None = None
    waits: bool = False
    """Whether the sweeper needs the loss of a job that another process runs."""
    in_driver: bool = True
    """Whether the driver runs the jobs itself, one after the other."""
    num_at_once: int = 1
    """Jobs that a machine runs side by side, each with devices of its own; 1: each has all."""
    objectives: tuple[str, ...] = (SweepConfig.objective,)
    directions: tuple[str, ...] = (SweepConfig.direction,)
    """minimize or maximize, for each objective. The first objective tells the best job."""
    study: Study | None = None
    """The study, if Optuna chooses the jobs."""
    driver: tuple[int, str] = field(default_factory=lambda: (os.getpid(), socket.gethostname()))
    """Its process and machine."""
    begun_s: float = field(default_factory=time.time)

    @classmethod
    def of(cls, config: DictConfig) -> "Sweep":
        """The sweep that a driver is about to begin.

        Args:
            config: as Hydra tells it to its callbacks, with `hydra`.
        """
        folder, given, sweeper = Path(config.hydra.sweep.dir).absolute(), settings_of(config), config.hydra.sweeper
        is_basic = [str(config.hydra[each].get("_target_", "")).startswith(_BASIC) for each in ("launcher", "sweeper")]
        swept = swept_in(config)
        total = None if swept is None else prod(map(_num_values, swept)) or None
        num_jobs = given.jobs or config.hydra.launcher.get("n_jobs") or 1
        return cls(
            folder=folder,
            start=SweepJournal(folder).nbytes,
            swept=tuple(each.get_key_element().lstrip("+") for each in swept or ()),
            total=total if is_basic[1] else _num_trials(sweeper, total),
            again=given.again,
            diverged=given.diverged,
            max_failures_in_a_row=given.max_failures_in_a_row,
            output=given.output,
            objectives=tuple(given.objectives),
            directions=tuple(given.directions),
            waits=not is_basic[1],
            in_driver=is_basic[0],
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
        """Whether as many jobs have failed one after the other that it ends. One that was refused tells nothing of the
        machine."""
        last = [event.status for event in events if event.event == ENDED][-self.max_failures_in_a_row :]
        return 0 < self.max_failures_in_a_row == last.count(FAILED)

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
        """Those settings of a job that the sweep varies."""
        return [each for each in overrides if each.lstrip("+").partition("=")[0] in self.swept]

    def identity(self, config_hash: str | None, overrides: list[str]) -> Identity:
        """The settings that tell one of its jobs from the others."""
        keys = tuple(key for key in self.swept if key.startswith(_NOT_HASHED))
        return Identity.of_job(config_hash, overrides, keys)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "journal"}


def _num_trials(sweeper: DictConfig, num_in_grid: int | None) -> int | None:
    """How many jobs a sweeper of a plugin runs; None where nobody knows."""
    wanted = sweeper.get("n_trials")
    is_grid = OmegaConf.select(sweeper, "sampler._target_") == _GRID
    return min(wanted, num_in_grid) if wanted is not None and is_grid and num_in_grid is not None else wanted


def settings_of(config: DictConfig) -> SweepConfig:
    """The settings of `sweep`, as given.

    Args:
        config: as Hydra tells it to its callbacks.
    """
    found = {each.name: OmegaConf.select(config, f"sweep.{each.name}") for each in fields(SweepConfig)}
    plain: dict[str, Any] = {
        name: OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for name, each in found.items()
    }
    return SweepConfig(**{name: value for name, value in plain.items() if value is not None})


def swept_in(config: DictConfig) -> list[Override] | None:
    """The settings that have several values, the sweeper's own first; None where Hydra alone can tell."""
    given = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    try:
        parsed = OverridesParser.create().parse_overrides([*params, *map(str, given)])  # type: ignore[arg-type]
    except HydraException:
        return None
    return [each for each in parsed if each.is_sweep_override()]


def _num_values(swept: Override) -> int:
    """The values of a setting, of which no more than `MAX_JOBS` are counted; 0 where they are not listed."""
    if not swept.is_discrete_sweep():
        return 0
    value = swept.value()
    values = value.range() if isinstance(value, RangeSweep) else swept.sweep_string_iterator()
    return sum(1 for _ in islice(values, MAX_JOBS + 1))
