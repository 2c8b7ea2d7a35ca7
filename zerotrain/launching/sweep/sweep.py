"""A sweep as its driver has begun it, and as each process knows it that runs one of its jobs. Imports no torch."""

import os
import socket
import time
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from zerotrain.config.schema import SweepConfig
from zerotrain.launching.sweep.study import Study
from zerotrain.report.journal import ENDED, FAILED, Identity, JobEvent, SweepJournal

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
        return Identity.of(config_hash, overrides, keys)

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
