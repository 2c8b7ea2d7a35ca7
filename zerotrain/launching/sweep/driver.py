"""The process that drives a sweep, and those that run its jobs. Imports no torch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from zerotrain.errors import ConfigError
from zerotrain.launching.sweep.journal import JOURNAL_NAME, SweepJournal, note_earlier_results
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.telling import Teller

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
        # A ${...} that leads nowhere, a range without a step, no launcher: Hydra is about to say so.
        with suppress(OmegaConfBaseException, ValueError, AttributeError):
            folder = Path(config.hydra.sweep.dir).absolute()
            if not SweepJournal(folder).nbytes:
                note_earlier_results(folder)
            self.sweep = Sweep.of(config)
            _driven.append((self.sweep, Teller(self.sweep)))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """A job is about to start, in this process."""
        if self.sweep is not None:
            _joined[:] = [self.sweep]


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
