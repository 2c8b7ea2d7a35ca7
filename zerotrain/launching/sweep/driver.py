"""The process that drives a sweep, and those that run its jobs. Imports no torch."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zerotrain.config.checks import makes, target_problems
from zerotrain.config.schema import Config, SweepConfig
from zerotrain.config.words import did_you_mean, word
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.launching import exits
from zerotrain.launching.sweep.study import begin_study, has_study
from zerotrain.launching.sweep.sweep import MAX_JOBS, Sweep, settings_of, swept_in
from zerotrain.launching.sweep.telling import Teller
from zerotrain.report.journal import JOURNAL_NAME, SweepJournal, note_earlier_results
from zerotrain.settings import settings_in

LATEST = "hydra.sweep.dir=latest"
_driven: list[tuple[Sweep, Teller]] = []
"""The sweep that this process drives, if it drives one."""
_joined: list[Sweep] = []
"""The sweep whose job this process runs."""


class SweepFolder(Callback):
    """Begins a sweep. Hydra passes this object on to each process that runs a job. Its hook for the end of a sweep is
    not called when that was cut off."""

    def __init__(self) -> None:
        self.sweep: Sweep | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The first job is about to start."""
        sweep = None
        # A ${...} that leads nowhere, a range without a step, no launcher: Hydra is about to say so.
        with suppress(OmegaConfBaseException, ValueError, AttributeError):
            folder = Path(config.hydra.sweep.dir).absolute()
            if not SweepJournal(folder).nbytes:
                note_earlier_results(folder)
            sweep = Sweep.of(config)
        if sweep is not None:
            for _, teller in _driven:  # of a study that begins again
                teller.close()
            self.sweep = _with_study(sweep, config)
            _driven.append((self.sweep, Teller(self.sweep)))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """A job is about to start, in this process."""
        if self.sweep is not None:
            _joined[:] = [self.sweep]


def _with_study(sweep: Sweep, config: DictConfig) -> Sweep:
    """The sweep with its study, where Optuna chooses its jobs. Ends the process where that cannot be: of another
    exception Hydra would make a warning."""
    try:
        if problems := list(_problems(config, sweep.total)):
            raise ConfigError(*problems)
        return replace(sweep, study=begin_study(config, sweep)) if has_study(config) else sweep
    except (ConfigError, ImportError) as error:
        said = str(error)
    except Exception as error:  # of whatever database it is
        said = f"hydra.sweeper.storage: the study cannot be used: {type(error).__name__}: {error}".partition("\n")[0]
    print(printable(said), file=sys.stderr)
    raise SystemExit(exits.CONFIG_PROBLEM)


def _problems(config: DictConfig, total: int | None) -> Iterator[str]:
    """A line for each thing that is wrong with a sweep, as far as nobody need train for it.

    Args:
        total: of its jobs, where that is known.
    """
    given, swept = settings_of(config), swept_in(config) or []
    settings = settings_in(given, "sweep.")
    if refused := [
        setting.must_be(name, value, word) for name, setting, value in settings if not setting.allows(value)
    ]:
        yield from refused
        return
    for each in swept:
        bounds = [getattr(each.value(), name, None) for name in ("start", "end", "stop", "step")]
        if any(isinstance(bound, float) and not isfinite(bound) for bound in bounds):
            yield f"{each.input_line}: its bounds must be finite numbers"
    if total is not None and total > MAX_JOBS and not has_study(config):
        yield f"-m: got {total:,} jobs or more; a sweep has {MAX_JOBS:,} at most; give fewer values"
    names, directions, pruner = given.objectives, given.directions, given.pruner
    if len(names) != len(directions):
        yield f"sweep.direction: got {len(directions)} for {len(names)} objectives; give one for each, or one for all"
    if len(names) > 1 and not has_study(config):
        yield f"sweep.objective: got {len(names)}; several need hydra/sweeper=optuna; give one"
    if names != [SweepConfig.objective] or pruner is not None:
        yield from _objective_problems(config, given, [each.get_key_element().lstrip("+") for each in swept])
    if pruner is None:
        return
    if not has_study(config):
        yield "sweep.pruner: needs hydra/sweeper=optuna; leave it out, or give that"
    elif len(names) > 1:
        yield f"sweep.pruner: got one for {len(names)} objectives; Optuna prunes by one; leave it out"
    elif problems := list(target_problems(pruner, name="sweep.pruner")):
        yield from problems
    else:
        from zerotrain.run.factory import build  # imports torch

        if not hasattr(made := build("sweep.pruner", pruner), "prune"):
            kind = type(made).__name__
            yield f"sweep.pruner._target_: got {pruner['_target_']}, which makes a {kind}; it must be a pruner"


def _objective_problems(config: DictConfig, given: SweepConfig, swept: list[str]) -> Iterator[str]:
    """Those of the objectives' names. The metrics are known where no job has others of its own."""
    from zerotrain.training.metrics import Metric
    from zerotrain.training.result import NUMBERS, in_evaluation  # imports torch

    fixed = {each.name for each in fields(Config)} - {"callbacks", "data"}
    metrics: list[str] | None = None
    if {each.partition(".")[0] for each in swept} <= fixed:
        callbacks: Any = OmegaConf.to_container(config.get("callbacks") or OmegaConf.create(), resolve=False)
        targets = {name: each.get("_target_") for name, each in callbacks.items() if isinstance(each, dict)}
        metrics = [name for name, target in targets.items() if isinstance(target, str) and makes(target, Metric)]
    known = [f"val_{each}" for each in ("loss", *(metrics or ()))]
    for name in given.objectives:
        evaluated = in_evaluation(name)
        is_there = evaluated is not None and (metrics is None or evaluated.partition("/")[0] in known)
        if name not in NUMBERS and not is_there:
            there = [*known, *NUMBERS]
            more = ", and val_NAME of a metric" if metrics is None else ""
            yield (
                f"sweep.objective: got {name}; there is no such value{did_you_mean(name, there)}; there are "
                f"{', '.join(there)}{more}"
            )
        elif evaluated is None and given.pruner is not None and len(given.objectives) == 1:
            yield (
                f"sweep.objective: got {name}, which no evaluation measures, with sweep.pruner; give val_loss or "
                "another metric, or leave the pruner out"
            )


def joined(folder: Path) -> Sweep:
    """The sweep whose job this process runs."""
    if not _joined:  # the user has left the callback out
        _joined.append(Sweep(folder=folder, start=SweepJournal(folder).nbytes))
        _driven.append((_joined[-1], Teller(_joined[-1])))
    return _joined[-1]


def find_latest(arguments: list[str]) -> None:
    """Let hydra.sweep.dir=latest be the newest folder that a sweep has made in multirun/.

    Args:
        arguments: of the command line, changed in place.

    Raises:
        ConfigError: there is none.
    """
    if LATEST not in arguments:
        return
    sweeps = sorted(
        path.parent for name in ("multirun.yaml", JOURNAL_NAME) for path in Path("multirun").glob(f"*/*/{name}")
    )
    if not sweeps:
        raise ConfigError("hydra.sweep.dir: got latest, but there is no sweep in multirun/ yet; leave it out")
    arguments[arguments.index(LATEST)] = f"hydra.sweep.dir={sweeps[-1]}"


def driven() -> "tuple[Sweep, Teller] | None":
    """The sweep that this process drives, and who tells its user of it."""
    return _driven[-1] if _driven else None
