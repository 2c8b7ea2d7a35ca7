"""One job of a sweep, in the process that runs it: it takes its place, and says in the journal what becomes of it."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import read_write

from zerotrain.config.compose import config_hash
from zerotrain.config.schema import EVALUATES, Config
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.launching import exits
from zerotrain.launching.job import await_free
from zerotrain.launching.sweep.driver import driven
from zerotrain.launching.sweep.places import JobPlace, WantedPlace, take_place
from zerotrain.launching.sweep.study import Study
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import (
    BEGUN,
    COMPLETED,
    DIVERGED,
    ENDED,
    FAILED,
    PRUNED,
    REFUSED,
    RUNNING,
    STOPPED,
    TAKEN,
    JobEvent,
    outcome,
)
from zerotrain.training.callbacks.loggers import SWEEP_VARIABLE, ids_in
from zerotrain.training.result import in_evaluation, value_in

MAX_NAME = 120
"""Characters of a name that any tracker takes."""
BY_NUMBER = "${hydra:job.num}"
"""The default of hydra.sweep.subdir."""
Value = float | list[float] | None
"""The objective of a job, or several; None of a job without one."""
JOB_LOG = "job.log"
"""Gets what a job prints that is not shown."""


class Member:
    """A job of a sweep.

    Args:
        number: the job's.
        overrides: its own settings.
        config: what they come to; None where they could not be read.
    """

    def __init__(self, sweep: Sweep, number: int, overrides: list[str], config: Config | None) -> None:
        self.sweep = sweep
        self.run_dir: Path | None = None
        """The folder it runs in, once it is known."""
        self._number, self._overrides, self._config = number, overrides, config
        self._hash = None if config is None else config_hash(config)
        self._has_begun = False

    def require_hope(self) -> None:
        """Go on unless so many jobs have failed one after the other that the sweep ends.

        Raises:
            SystemExit: it does.
        """
        if self.sweep.gives_up_after(self.sweep.events()):
            raise SystemExit(exits.FAILED)

    def take_place(self, named: Path, may_move: bool, stack: ExitStack) -> JobPlace:
        """Find the job's folder and lock it.

        Args:
            named: the folder that Hydra names.
            may_move: whether another does as well.
            stack: gets the folder's lock.

        Raises:
            ConfigError: there is none for it.
        """
        identity = self.sweep.identity(self._hash, self._overrides)
        wanted = WantedPlace(sweep=self.sweep, identity=identity, config=self._config, named=named, may_move=may_move)
        while True:
            with self.sweep.journal.held() as book:
                place = take_place(wanted, book, stack)
            if not place.runs_elsewhere or not self.sweep.waits:
                self.run_dir = place.run_dir
                return place
            await_free(place.run_dir)

    def leave(self, place: JobPlace) -> Value:
        """The job is left as it is: it is done, or another process runs it. Return its value."""
        if place.taken is None:
            self._say(TAKEN, place.run_dir, RUNNING)
            return None
        status = outcome(place.taken, self._said_before(place.run_dir))
        value, _ = self._value(place.taken, status)
        self._say(TAKEN, place.run_dir, status, loss=place.taken["final_val_loss"], value=value)
        return value

    @property
    def trial(self) -> dict[str, Any] | None:
        """The facts for a pruner, as arguments of `zerotrain.training.callbacks.early_stopping.Trial`; None: there is none."""
        study, config = self.sweep.study, self._config
        if study is None or config is None or config.sweep.pruner is None:
            return None
        metric = in_evaluation(self.sweep.objectives[0])
        pruner = config.sweep.pruner
        return {"url": study.url, "study": study.name, "number": self._number, "metric": metric, "pruner": pruner}

    def begin(self) -> None:
        """Its ranks are about to start."""
        assert self.run_dir is not None
        self._has_begun = True
        self._say(BEGUN, self.run_dir)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, the trackers of ranks that are started get the sweep as the group of the run, and what differs as its
        name."""
        name = " ".join(self.sweep.varied(self._overrides))
        said = {"group": "/".join(self.sweep.folder.parts[-2:]), "name": name[:MAX_NAME]}
        os.environ[SWEEP_VARIABLE] = json.dumps(said)
        try:
            yield
        finally:
            del os.environ[SWEEP_VARIABLE]

    def end(self, result: dict[str, Any]) -> Value:
        """It has ended with this result. Return its value."""
        assert self.run_dir is not None
        assert self._config is not None
        was_evaluated = result["status"] == COMPLETED and EVALUATES.holds(self._config, result["world_size"])
        status = outcome(result, DIVERGED if was_evaluated and result["final_val_loss"] is None else None)
        value, problem = self._value(result, status)
        error = problem if status == COMPLETED else result["error"] or problem
        self._say(ENDED, self.run_dir, status, error=error, loss=result["final_val_loss"], value=value)
        return value

    def end_failed(self, error: ZeroTrainError, named: Path) -> None:
        """It has failed, or was refused."""
        was_refused = isinstance(error, ConfigError) and not self._has_begun
        status = outcome({"status": FAILED, "error": str(error), "final_val_loss": None, "final_train_loss": None})
        self._say(REFUSED if was_refused else ENDED, self.run_dir or named, status, error=str(error))

    def end_stopped(self) -> None:
        """A signal ends it at once."""
        if self._has_begun and self.run_dir is not None:
            self._say(ENDED, self.run_dir, STOPPED, error="stopped by a signal")

    def _value(self, result: dict[str, Any], status: str) -> tuple[Value, str | None]:
        """The value that a sweeper gets for a job, a list where there are several objectives, and the reason if it gets
        nothing though the job did well. A trial without a value has failed."""
        if status not in (COMPLETED, PRUNED, STOPPED):
            return None, None
        try:
            values = [value_in(result, name) for name in self.sweep.objectives]
        except LookupError as error:
            return None, f"sweep.objective: {error.args[0]}"
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None, None
        return (known[0] if len(known) == 1 else known), None

    def _said_before(self, run_dir: Path) -> str | None:
        events = [event for event in self.sweep.journal.events() if self.sweep.folder / event.folder == run_dir]
        return events[-1].status if events else None

    def _say(
        self,
        event: str,
        run_dir: Path,
        status: str | None = None,
        error: str | None = None,
        loss: float | None = None,
        value: Value = None,
    ) -> None:
        self.sweep.journal.append(
            JobEvent(
                event=event,
                job=self._number,
                folder=Path(os.path.relpath(run_dir, self.sweep.folder)).as_posix(),
                hash=self._hash,
                overrides=self._overrides,
                status=status,
                error=error,
                final_val_loss=loss,
                value=value[0] if isinstance(value, list) else value,
                trackers=ids_in(run_dir) if event == ENDED else {},
            )
        )
        if self.sweep.is_driven_here and (found := driven()) is not None:
            found[1].look()


def named_by_trial(study: Study, named: Path, hydra: Any, by_number: bool) -> Path:
    """The folder of a job that has the number of its trial: that counts on where Hydra begins again with 0."""
    with read_write(hydra):
        hydra.job.num = study.trials[hydra.job.num]
        if by_number and named.name != str(hydra.job.num):
            with suppress(OSError):  # Hydra has made it; it stays where it holds something
                named.rmdir()
            named = named.with_name(str(hydra.job.num))
            hydra.runtime.output_dir = str(named)
    return named
