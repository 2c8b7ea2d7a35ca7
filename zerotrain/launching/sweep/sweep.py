"""A sweep, for its driver and for each process of its jobs. Imports no torch."""

import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from zerotrain.config.compose import OptunaConfig
from zerotrain.config.schema import SweepConfig
from zerotrain.report.journal import ENDED, FAILED, JobEvent, SweepJournal

if TYPE_CHECKING:
    from zerotrain.launching.sweep.study import Study


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
    settings: SweepConfig = field(default_factory=SweepConfig)
    """Its first objective tells the best job."""
    waits: bool = False
    """Whether the sweeper needs the loss of a job in another process."""
    in_driver: bool = True
    """Whether the driver runs the jobs itself, one after the other."""
    num_at_once: int = 1
    """Jobs side by side on a machine, each with devices of its own; 1: each has all."""
    study: "Study | None" = None
    """The study, if Optuna chooses the jobs."""
    begun_s: float = field(default_factory=time.time)

    @classmethod
    def from_config(cls, config: DictConfig) -> "Sweep":
        """The sweep about to begin in a driver.

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
            settings=settings,
            waits=not has_basic_sweeper,
            in_driver=has_basic_launcher,
            num_at_once=num_jobs if num_jobs > 0 else os.cpu_count() or 1,
        )

    @cached_property
    def journal(self) -> SweepJournal:
        """The file of its events."""
        return SweepJournal(self.folder)

    @property
    def shows_all(self) -> bool:
        """Whether what its jobs print is shown."""
        output = self.settings.output
        return output == "full" or (output is None and self.total is not None and self.total <= FEW)

    def gives_up_after(self, events: list[JobEvent]) -> bool:
        """Whether it ends, since too many jobs have failed one after the other. A refused one tells nothing of the
        machine."""
        most = self.settings.max_failures_in_a_row
        statuses = [event.status for event in events if event.event == ENDED][-most:]
        return 0 < most == statuses.count(FAILED)

    def events(self) -> list[JobEvent]:
        """The events of its jobs since it was begun."""
        return self.journal.events(self.start)

    def events_to_count(self) -> list[JobEvent]:
        """Those of its jobs: of a study also before it was begun, as the sweeper does not ask for them again."""
        return self.events() if self.study is None else self.journal.events()

    def value_of(self, event: JobEvent) -> float | None:
        """The first objective of a job; None where it is not known, or no number."""
        if self.settings.objectives[0] == SweepConfig.objective:
            return event.final_val_loss
        return event.value[0] if isinstance(event.value, list) else event.value

    def varied(self, overrides: list[str]) -> list[str]:
        """The settings of a job varied by the sweep."""
        return [override for override in overrides if override.lstrip("+").partition("=")[0] in self.swept]

    def identity(self, config_hash: str | None, overrides: list[str]) -> tuple[str, ...] | None:
        """The hash of a job, and the settings that the hash leaves out though the sweep varies them, such as
        `launch.nproc_per_node`. They find the same job in the next sweep. None of a job without a hash."""
        if config_hash is None:
            return None
        names = [name for name in self.swept if name.startswith(_NOT_HASHED)]
        return config_hash, *sorted(override for override in overrides if override.partition("=")[0] in names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "journal"}


def settings_of(config: DictConfig) -> SweepConfig:
    """The settings of `sweep`, as given.

    Args:
        config: as Hydra tells it to its callbacks.
    """
    values: Any = OmegaConf.to_container(config.sweep, resolve=True)
    return SweepConfig(**{name: value for name, value in values.items() if value is not None})


def has_study(config: DictConfig) -> bool:
    """Whether Optuna chooses the jobs of a sweep.

    Args:
        config: as Hydra tells it to its callbacks, with `hydra`.
    """
    return bool(config.hydra.sweeper.get("_target_") == OptunaConfig._target_)


def overrides_in(config: DictConfig) -> dict[str, Override]:
    """The settings given to a sweep, by name. The command line wins over the sweeper's own `params`.

    Raises:
        HydraException: one of them cannot be read.
    """
    overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    hydra = GlobalHydra.instance()
    parser = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)  # for glob()
    parsed = parser.parse_overrides([*params, *map(str, overrides)])  # type: ignore[arg-type]
    return {override.get_key_element(): override for override in parsed}


def swept_in(config: DictConfig) -> list[Override] | None:
    """The settings with several values, the sweeper's own first; None if Hydra alone can tell."""
    try:
        return [override for override in overrides_in(config).values() if override.is_sweep_override()]
    except HydraException:
        return None


def _num_values(swept: Override) -> int:
    """The number of values of a setting, counted up to `MAX_JOBS`; 0 if they are not listed."""
    if not swept.is_discrete_sweep():
        return 0
    value = swept.value()
    values = value.range() if isinstance(value, RangeSweep) else swept.sweep_string_iterator()
    return sum(1 for _ in islice(values, MAX_JOBS + 1))
