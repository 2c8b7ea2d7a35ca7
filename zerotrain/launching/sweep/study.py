"""The study of a sweep whose jobs Optuna chooses, and its sweeper: it asks for trials, and tells the journal's word
on their jobs. Imports neither Optuna nor torch before a sweep has a study."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from zerotrain.config.checks import makes, target_problems
from zerotrain.config.compose import first_paragraph
from zerotrain.config.words import word
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.lock import can_lock, lock, open_lock, whole
from zerotrain.files.terminal import package
from zerotrain.files.untrusted import printable
from zerotrain.launching.sweep.sweep import Sweep, overrides_in
from zerotrain.report import journal

STUDY_NAME = "study.db"
BEST_NAME = "optimization_results.yaml"
DRIVERS = ".drivers"
"""Folder of a lock for each driver, in the sweep's folder: it tells whether the driver of a running trial is there."""
_PLUGIN = "hydra_plugins.zerotrain"
_DRIVER, _DROPPED = "zerotrain.driver", "zerotrain.dropped"
"""Attributes of a trial: the file of its driver's lock; and a mark of one without a job: it does not count."""
_OBJECTIVES, _STARTS = "zerotrain.objective", "zerotrain.starts"
"""Attributes of the study: its objectives, and how often it was begun."""


class StudyError(ZeroTrainError):
    """The study has nothing to show, or cannot be reached."""


@dataclass(kw_only=True)
class Study:
    """The study of a sweep. The process of a job gets its address, its name and the number of its trials alone."""

    url: str
    name: str
    num_trials: int
    """In all."""
    space: dict[str, Any] = field(default_factory=dict)
    """The distribution of each setting chosen by Optuna."""
    fixed: tuple[str, ...] = ()
    """The settings of all jobs."""
    _study: Any = None
    _sweep: Any = None
    _own_lock: Any = None
    """The lock of this process as a driver, in an open file."""
    _asked: list[Any] = field(default_factory=list)
    """The trials whose jobs run."""
    _nbytes_before: int = 0
    """The size of the journal before these jobs."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("url", "name", "num_trials")}

    @classmethod
    def begin(cls, config: DictConfig, sweep: Sweep) -> "Study":
        """Open the study of a sweep, or make it.

        Trials without a process any more wait again: with the same values, so their jobs are found and go on.

        Args:
            config: as Hydra tells it to its callbacks.

        Raises:
            ConfigError: the study cannot be opened, or is one of something else.
            StudyError: its database fails.
        """
        from zerotrain.training.callbacks import early_stopping  # imports torch, as the jobs are about to

        package("optuna", extra="sweeps", needed_by="hydra/sweeper=optuna")
        if problems := list(_problems(config, list(sweep.settings.directions))):
            raise ConfigError(*problems)
        try:
            sweeper, overrides = config.hydra.sweeper, overrides_in(config)
        except HydraException as error:
            raise ConfigError(f"hydra.sweeper.params: {first_paragraph(error)}") from error
        swept = {name: override for name, override in overrides.items() if override.is_sweep_override()}
        study = cls(
            url=sweeper.storage or f"{early_stopping.SQLITE}{sweep.folder / STUDY_NAME}",
            name=sweeper.study_name or ("sweep" if sweeper.storage is None else str(sweep.folder)),
            num_trials=sweep.total or 0,
            space={name: distribution(override) for name, override in swept.items()},
            fixed=tuple(str(override.input_line) for name, override in overrides.items() if name not in swept),
            _sweep=sweep,
        )
        _sampler(sweeper.sampler, 0, swept)  # refuses it before there is a study
        with sweep.journal.held(), study._naming_storage():  # two drivers would make two studies
            storage = early_stopping.open_storage(study.url)
            study._study = _open_study(storage, study, sweep)
            study._own_lock = _lock_as_driver(sweep.folder)
            for trial in study._study.get_trials(deepcopy=False):
                lock_path = Path(str(trial.user_attrs.get(_DRIVER, "")))
                # A trial of another program, or on another machine, may have its driver.
                is_known = lock_path.is_absolute() and lock_path.parent.is_dir()
                if trial.state.name == "RUNNING" and is_known and not lock_path.exists():
                    storage.set_trial_state_values(trial._trial_id, type(trial.state).WAITING)
            study._drop_strangers()
            starts = int(study._study.user_attrs.get(_STARTS, 0))
            study._study.set_user_attr(_STARTS, starts + 1)
            study._study.sampler = _sampler(sweeper.sampler, starts, swept)
            if not study.num_left:
                print(f"the study has its {len(study._trials)} trials; a larger hydra.sweeper.n_trials asks for more")
        register_sweeper()
        return study

    @property
    def num_left(self) -> int:
        """Trials yet to be asked for, by any driver."""
        states = [trial.state.name for trial in self._trials]
        return max(0, self.num_trials - len(states) + states.count("WAITING"))

    @property
    def _trials(self) -> list[Any]:
        """The trials of jobs."""
        return [trial for trial in self._study.get_trials(deepcopy=False) if _DROPPED not in trial.user_attrs]

    def _drop_strangers(self) -> None:
        """Let waiting trials fail if this sweep does not vary one of their settings: it is misspelt, or was varied
        before. Their jobs would not have it."""
        for trial in self._trials:
            names = ", ".join(sorted({*trial.params, *trial.system_attrs.get("fixed_params", ())} - self.space.keys()))
            if names and trial.state.name == "WAITING":
                print(f"trial {trial.number} fails: the sweep has no {printable(names, keep='')}", file=sys.stderr)
                self._study._storage.set_trial_user_attr(trial._trial_id, _DROPPED, True)
                self._study._storage.set_trial_state_values(trial._trial_id, type(trial.state).FAIL)

    @contextmanager
    def _naming_storage(self) -> Iterator[None]:
        """Errors of the database in here are one line."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (OptunaError, SQLAlchemyError) as error:
            text = str(error.__cause__ or error).partition("\n")[0]  # the rest is SQL
            raise StudyError(printable(f"hydra.sweeper.storage: {text}; the same command goes on", keep="")) from error
        except KeyError as error:
            try:
                self._study._storage.get_study_id_from_name(self.name)
            except KeyError:
                raise StudyError(
                    f"hydra.sweeper.storage: the study {printable(self.name, keep='')} was deleted in mid-sweep; the "
                    "same command begins another"
                ) from error
            raise

    def ask(self, num: int) -> dict[int, tuple[str, ...]]:
        """The settings of so many further jobs, by the numbers of their trials; fewer where fewer trials are left.

        Raises:
            ConfigError: the study has a setting with values of another kind.
            StudyError: its database fails.
        """
        self._asked = []
        with self._sweep.journal.held(), self._naming_storage():  # two drivers would ask for more trials than are left
            self._nbytes_before = self._sweep.journal.nbytes
            self._drop_strangers()
            for _ in range(min(num, self.num_left)):
                trial = self._study.ask()
                trial.set_user_attr(_DRIVER, str(self._own_lock.name))
                self._asked.append(trial)
                for name, values in self.space.items():
                    _choose_value(trial, name, values)
            return {trial.number: self._settings_of(trial) for trial in self._asked}

    def _settings_of(self, trial: Any) -> tuple[str, ...]:
        return (*(f"{name}={trial.params[name]}" for name in self.space), *self.fixed)

    def tell(self) -> None:
        """Tell Optuna the fate of the jobs of the last `ask`, by the journal. A job without a value has failed.

        Raises:
            StudyError: its database fails.
        """
        from optuna.trial import TrialState

        from zerotrain.launching.sweep.member import read_fate  # imports torch, as the jobs have by now

        events = {event.job: event for event in self._sweep.journal.events(self._nbytes_before, placed=True)}
        with self._naming_storage():
            for trial in self._asked:
                event, settings = events.get(trial.number), self._settings_of(trial)
                status, value = (None, None) if event is None else (event.status, event.value)
                if status is None:  # the disk was full
                    folder = event.folder if event is not None and event.is_within else str(trial.number)
                    status, value = read_fate(self._sweep.folder / folder, settings, self._sweep.settings.objectives)
                state = TrialState.PRUNED if status == journal.PRUNED else TrialState.FAIL if value is None else None
                try:
                    self._study.tell(trial, value if state is None else None, state, skip_if_finished=True)
                except RuntimeError:  # of a grid without further points, which stops `Study.optimize`
                    continue
                except KeyError as error:  # of a grid: it has no point of a trial that a user has queued
                    if error.args != ("grid_id",):
                        raise

    def write_best(self, folder: Path) -> None:
        """Write the best trial into a folder; of several objectives all trials beaten by no other. Nothing where
        no trial has completed.

        Raises:
            StudyError: the database fails.
        """
        with self._naming_storage():
            trials = self._study.best_trials
        if not trials:
            return
        best: dict[str, Any] = {"best_params": trials[0].params, "best_value": trials[0].values[0]}
        if len(self._study.directions) > 1:
            best = {"solutions": [{"params": trial.params, "values": trial.values} for trial in trials]}
        with whole(folder / BEST_NAME) as file:
            file.write(OmegaConf.to_yaml(OmegaConf.create({"name": "optuna"} | best)).encode())

    def require_best(self) -> None:
        """Raise a StudyError where all trials have failed."""
        with self._naming_storage():
            if {trial.state.name for trial in self._trials} <= {"FAIL"}:
                raise StudyError("no trial of the study has completed, so that it has no best one")


class OptunaSweeper(Sweeper):
    """Hydra's sweeper of `hydra/sweeper=optuna`: in turns, as many jobs as are to run side by side."""

    __module__ = _PLUGIN

    def __init__(self, n_jobs: int, **settings: Any) -> None:
        self._num_at_once = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See `Sweeper.setup`."""
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        sweeps = (getattr(callback, "sweep", None) for callback in hydra_context.callbacks.callbacks)
        [self._sweep] = [sweep for sweep in sweeps if isinstance(sweep, Sweep)]

    def sweep(self, arguments: list[str]) -> None:
        """See `Sweeper.sweep`."""
        study = self._sweep.study
        assert study is not None
        study.write_best(self._sweep.folder)
        while jobs := study.ask(self._num_at_once):
            while jobs:  # Hydra counts its jobs on from a first one: those with numbers in a row run side by side
                first = number = min(jobs)
                row = []
                while number in jobs:
                    row.append(jobs.pop(number))
                    number += 1
                self._launcher.launch(row, initial_job_idx=first)
            study.tell()
            study.write_best(self._sweep.folder)
        study.require_best()


def register_sweeper() -> None:
    """Make the sweeper known to Hydra, which takes a plugin by name, and from the package hydra_plugins alone."""
    sys.modules.setdefault(_PLUGIN.partition(".")[0], ModuleType("hydra_plugins"))  # of no plugin that is installed
    sys.modules[_PLUGIN] = sys.modules[__name__]
    Plugins.instance().register(OptunaSweeper)


def distribution(override: Override) -> Any:
    """The distribution of Optuna for a setting with several values.

    Raises:
        ConfigError: there is none.
    """
    from optuna import distributions

    value: Any = override.value()
    try:
        if override.is_choice_sweep() or (isinstance(value, RangeSweep) and value.shuffle):
            return distributions.CategoricalDistribution(_points(override))
        kinds: tuple[Any, ...] = (distributions.FloatDistribution, distributions.IntDistribution)
        if isinstance(value, RangeSweep):
            has_integers = all(isinstance(number, int) for number in (value.start, value.stop, value.step))
            return kinds[has_integers](value.start, value.stop, step=value.step)
        has_integers = isinstance(value.start, int) and isinstance(value.end, int)
        return kinds[has_integers](value.start, value.end, log="log" in value.tags)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def _sampler(values: DictConfig, starts: int, swept: dict[str, Override]) -> Any:
    """The sampler of a study.

    Args:
        starts: how often the study was begun before.
    """
    from optuna.samplers import BaseSampler, GridSampler

    from zerotrain.run.factory import build  # imports torch

    name = "hydra.sweeper.sampler"
    arguments: Any = OmegaConf.to_container(values) if OmegaConf.is_dict(values) else {"_target_": values}
    if arguments.get("_partial_"):  # a grid, which gets its points
        arguments |= {"_partial_": False, "_args_": [{name: _points(override) for name, override in swept.items()}]}
    if problems := list(target_problems(arguments, name=name)):
        raise ConfigError(*problems)
    if (seed := arguments.get("seed")) is not None:
        if type(seed) is not int or not 0 <= seed < 2**31:
            raise ConfigError(f"{name}.seed: got {word(seed)}; it must be between 0 and 2**31 - 1, or null")
        # Others would choose the same values again; the order of a grid must stay.
        arguments["seed"] += 0 if makes(arguments["_target_"], GridSampler) else starts
    sampler = build(name, arguments)
    if not isinstance(sampler, BaseSampler):
        raise ConfigError(f"{name}._target_: got {arguments['_target_']}; it must make a sampler of Optuna")
    return sampler


def _points(override: Override) -> list[Any]:
    """The values of a setting, always in the same order, also with `shuffle`."""
    value: Any = override.value()
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a grid has points; give choice() or range()")
    if override.is_range_sweep():
        return list(value.range())
    choices = value.list if isinstance(value, ChoiceSweep) else override.sweep_iterator()
    return [Transformer.encode(choice) for choice in choices]


def _choose_value(trial: Any, name: str, values: Any) -> None:
    try:
        trial._suggest(name, values)  # as `Study.ask` does, but for a trial that has its driver by now
    except ValueError as error:
        raise ConfigError(
            f"{name}: the study has other values for it ({str(error).rstrip('.')}); give it those, another "
            "hydra.sweep.dir or another hydra.sweeper.study_name"
        ) from error


def _problems(config: DictConfig, directions: list[str]) -> Iterator[str]:
    sweeper = config.hydra.sweeper
    names = list(sweeper.direction) if OmegaConf.is_list(sweeper.direction) else [sweeper.direction]
    if names != [None] and any(name not in ("minimize", "maximize") for name in names):
        yield f"hydra.sweeper.direction: got {word(sweeper.direction)}; it must be minimize or maximize"
    elif names not in ([None], directions):
        got, has = ("[" + ",".join(group) + "]" if len(group) > 1 else group[0] for group in (names, directions))
        yield (
            f"hydra.sweeper.direction: got {got}, but sweep.direction={has}; give sweep.direction={got} and "
            "leave this one out"
        )
    if not isinstance(sweeper.storage, str | None):
        yield f"hydra.sweeper.storage: got {word(sweeper.storage)}; it must be a URL, or null for study.db"
    if "?" in config.hydra.sweep.dir and sweeper.storage is None:
        yield f"hydra.sweep.dir: got {config.hydra.sweep.dir}; no URL of {STUDY_NAME} can have a ?; give another"
    for name in ("n_trials", "n_jobs"):
        if sweeper[name] < 1:
            yield f"hydra.sweeper.{name}: got {sweeper[name]}; it must be 1 or more"


def _open_study(storage: Any, wanted: Study, sweep: Sweep) -> Any:
    """The study of this name, made where there is none. A ConfigError where it is about something else: its trials
    would be compared with others."""
    import optuna

    from zerotrain.training.callbacks.early_stopping import without_password

    directions: list[Any] = list(sweep.settings.directions)
    objectives = list(sweep.settings.objectives)
    try:
        study = optuna.load_study(study_name=wanted.name, storage=storage)
    except KeyError:
        study = optuna.create_study(study_name=wanted.name, storage=storage, directions=directions)
        study.set_user_attr(_OBJECTIVES, objectives)
    study_directions = [direction.name.lower() for direction in study.directions]
    study_objectives = study.user_attrs.get(_OBJECTIVES, objectives)
    if study_directions != directions or study_objectives != objectives:
        wants, has = (
            " and ".join(f"{direction} {name}" for direction, name in zip(*pair, strict=False))
            for pair in ((directions, objectives), (study_directions, study_objectives))
        )
        raise ConfigError(
            f"sweep.objective: got {wants}, but the study {wanted.name} in {without_password(wanted.url)} is to {has}; "
            "give that, or another hydra.sweeper.study_name"
        )
    if sweep.settings.again == "all" and (num_trials := len(study.get_trials(deepcopy=False))):
        raise ConfigError(
            f"sweep.again: got all, but the study {wanted.name} has {num_trials} trials, which it keeps; give another "
            "hydra.sweeper.study_name, or another hydra.sweep.dir"
        )
    return study


def _lock_as_driver(folder: Path) -> BinaryIO:
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
