"""One job of a sweep, in its own process: it takes its place, and notes its state in the journal.

Its folder is one with the job already in it, found by its settings and not by its number, or one of its own, without
files of another job.
"""

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, STEP, entries
from zerotrain.config.compose import config_hash
from zerotrain.config.schema import EVALUATES, Config
from zerotrain.device.kinds import only_gpus, visible_gpus
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.lock import LOCK_NAME, is_held, lock, open_lock
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching import exits
from zerotrain.launching.job import CONFIG_NAME, FolderInUseError, await_free, locked
from zerotrain.launching.resuming import holds
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.telling import driven_sweep
from zerotrain.report import journal
from zerotrain.training.callbacks.loggers import SWEEP_VARIABLE, ids_in
from zerotrain.training.result import RESULT_NAME, in_evaluation, read_result, value_in


@dataclass(frozen=True, kw_only=True)
class JobPlace:
    """A job's folder, locked by this process but where the job runs elsewhere."""

    run_dir: Path
    result: dict[str, Any] | None = None
    """The result in it, if the job is to be left as it is."""
    status: str = journal.RUNNING
    """The status of a job to be left as it is."""
    goes_on: bool = False
    """Whether it has checkpoints there to go on from."""
    runs_elsewhere: bool = False
    """Whether another process runs the job there."""


MAX_NAME = 120
"""Characters of a name; any tracker takes as many."""
BY_NUMBER = "${hydra:job.num}"
"""The default of hydra.sweep.subdir."""
Value = float | list[float] | None
"""The objective of a job, or several; None of a job without one."""
JOB_LOG = "job.log"
"""Gets the output of a job if it is not shown."""


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
        self._identity = sweep.identity(self._hash, overrides)
        self._has_begun = False

    def require_hope(self) -> None:
        """End the sweep where too many jobs have failed one after the other.

        Raises:
            SystemExit: it ends.
        """
        if self.sweep.gives_up_after(self.sweep.events()):
            raise SystemExit(exits.FAILED)

    def take_place(self, hydra_dir: Path, may_move: bool, stack: ExitStack) -> JobPlace:
        """Find the job's folder by its settings, and lock it. The journal is locked meanwhile: no two jobs find one
        folder.

        Args:
            hydra_dir: the folder named by Hydra.
            may_move: whether another does as well.
            stack: gets the folder's lock.

        Raises:
            ConfigError: the folder is named by the user and another job has it, or it cannot be written.
        """
        while True:
            with self.sweep.journal.held() as append:
                place = self._find_place(hydra_dir, may_move, stack)
                if place.run_dir != hydra_dir:
                    with suppress(OSError):  # Hydra has made it; it stays where it holds something
                        hydra_dir.rmdir()
                if place.result is None and not place.runs_elsewhere:
                    append(self._event(journal.PLACED, place.run_dir))
            if not place.runs_elsewhere or not self.sweep.waits:
                self.run_dir = place.run_dir
                return place
            await_free(place.run_dir)

    def _find_place(self, hydra_dir: Path, may_move: bool, stack: ExitStack) -> JobPlace:
        """The folder with the job already in it, or one without files of another job."""
        erases = self._config is not None and self._config.launch.overwrite
        if erases or not may_move:
            self._require_unclaimed(hydra_dir)
        events = self.sweep.journal.events(placed=True)
        last_events = {event.folder: event for event in events if event.event != journal.TAKEN}
        for event in last_events.values():
            run_dir = self.sweep.folder / event.folder
            # Its process has noted the job there as soon as it had the lock.
            if event.is_within and self._is_own(event) and is_held(run_dir / LOCK_NAME):
                return JobPlace(run_dir=run_dir, runs_elsewhere=True)
        for run_dir, own_event in [(hydra_dir, None)] if erases else list(self._candidates(hydra_dir, may_move)):
            try:
                stack.enter_context(locked(run_dir))
            except FolderInUseError:
                if not may_move:
                    raise
                continue
            place = JobPlace(run_dir=run_dir) if erases else self._judge(run_dir, own_event, may_move)
            if place is not None:
                return place
            stack.close()
        for number in itertools.count(2):
            run_dir = hydra_dir.with_name(f"{hydra_dir.name}_{number}")
            with suppress(FileExistsError):
                run_dir.mkdir()
                stack.enter_context(locked(run_dir))
                break
        return JobPlace(run_dir=run_dir)

    def _is_own(self, event: journal.JobEvent) -> bool:
        """Whether an event is about this job, whatever number it had."""
        return self._identity is not None and self._identity == self.sweep.identity(event.hash, event.overrides)

    def _require_unclaimed(self, hydra_dir: Path) -> None:
        """With hydra.sweep.subdir=same the second job erased the first (2026-11-21)."""
        for event in self.sweep.events():
            if self.sweep.folder / event.folder == hydra_dir and not self._is_own(event):
                raise ConfigError(
                    f"hydra.sweep.subdir: got {hydra_dir.name}, which job {event.job} uses too; each job needs a "
                    "folder of its own; the default is ${hydra:job.num}"
                )

    def _candidates(self, hydra_dir: Path, may_move: bool) -> Iterator[tuple[Path, journal.JobEvent | None]]:
        """By the journal, the folders with the job in them, and its last event there; then Hydra's folder, if it
        is free."""
        sweep, config, runs_anew = self.sweep, self._config, self.sweep.settings.again == "all"
        events = sweep.journal.events()
        own_events: dict[Path, journal.JobEvent] = {}
        for event in reversed(sweep.events() if runs_anew else events):
            if event.is_within and self._is_own(event):
                own_events.setdefault(sweep.folder / event.folder, event)
        for run_dir, event in own_events.items():
            if run_dir.is_dir() and config is not None and holds(config, run_dir) is not False:
                yield run_dir, event
        if hydra_dir in own_events:
            return
        has_config = os.path.lexists(hydra_dir / CONFIG_NAME)
        there = [event for event in events if sweep.folder / event.folder == hydra_dir]
        if runs_anew and has_config:
            is_free = False
        elif there:
            is_free = self._is_own(there[-1]) or (there[-1].event == journal.REFUSED and not has_config)
        else:
            is_free = config is None or holds(config, hydra_dir) is not False
        if is_free or not may_move:
            yield hydra_dir, None

    def _judge(self, run_dir: Path, event: journal.JobEvent | None, may_move: bool) -> JobPlace | None:
        """The place for the job in a folder; None if it completed there and is to run again: a completed run is never
        erased."""
        has_checkpoints = bool(entries(run_dir / CHECKPOINTS, STEP))
        going_on = JobPlace(run_dir=run_dir, goes_on=has_checkpoints)
        if self._config is None or (event is None and not holds(self._config, run_dir)):
            return JobPlace(run_dir=run_dir)
        try:
            result = read_result(run_dir / RESULT_NAME)
        except (OSError, UntrustedFileError):  # none yet, or one that the checks of the folder refuse
            return going_on
        has_diverged = event is not None and event.status == journal.DIVERGED
        status = journal.outcome(result, was_evaluated=has_diverged)
        is_done = status in (journal.COMPLETED, journal.PRUNED)
        is_left = status in (journal.FAILED, journal.DIVERGED) and self.sweep.settings.again == "none"
        has_trained_to_end = result["status"] == journal.COMPLETED
        if is_done or is_left or (has_trained_to_end and not may_move):
            return JobPlace(run_dir=run_dir, result=result, status=status)
        return None if has_trained_to_end else going_on

    def leave(self, place: JobPlace) -> Value:
        """The job is left as it is: it is done, or another process runs it. Return its value."""
        loss, value = None, None
        if place.result is not None:
            loss = place.result["final_val_loss"]
            value, _ = objective_in(place.result, place.status, self.sweep.settings.objectives)
        self._say(journal.TAKEN, place.run_dir, place.status, final_val_loss=loss, value=value)
        return value

    @property
    def trial(self) -> dict[str, Any] | None:
        """The arguments of `early_stopping.Trial`, for a pruner; None: there is no pruner."""
        study, config = self.sweep.study, self._config
        if study is None or config is None or config.sweep.pruner is None:
            return None
        metric = in_evaluation(self.sweep.settings.objectives[0])
        pruner = config.sweep.pruner
        return {"url": study.url, "study": study.name, "number": self._number, "metric": metric, "pruner": pruner}

    def begin(self) -> None:
        """Its ranks are about to start."""
        assert self.run_dir is not None
        self._has_begun = True
        self._say(journal.BEGUN, self.run_dir)

    @contextmanager
    def labels(self) -> Iterator[None]:
        """Inside, the trackers of new ranks get the sweep as the group of the run, and its varied settings as its
        name."""
        name = " ".join(self.sweep.varied(self._overrides))
        labels = {"group": "/".join(self.sweep.folder.parts[-2:]), "name": name[:MAX_NAME]}
        os.environ[SWEEP_VARIABLE] = json.dumps(labels)
        try:
            yield
        finally:
            del os.environ[SWEEP_VARIABLE]

    def end(self, result: dict[str, Any]) -> Value:
        """It has ended with this result. Return its value."""
        assert self.run_dir is not None
        assert self._config is not None
        was_evaluated = result["status"] == journal.COMPLETED and EVALUATES.holds(self._config, result["world_size"])
        status = journal.outcome(result, was_evaluated=was_evaluated)
        value, problem = objective_in(result, status, self.sweep.settings.objectives)
        error = problem if status == journal.COMPLETED else result["error"] or problem
        self._say(
            journal.ENDED, self.run_dir, status, error=error, final_val_loss=result["final_val_loss"], value=value
        )
        return value

    def end_failed(self, error: ZeroTrainError, hydra_dir: Path) -> None:
        """It has failed, or was refused."""
        event = journal.REFUSED if isinstance(error, ConfigError) and not self._has_begun else journal.ENDED
        result = {"status": journal.FAILED, "error": str(error), "final_val_loss": None, "final_train_loss": None}
        self._say(event, self.run_dir or hydra_dir, journal.outcome(result), error=str(error))

    def end_stopped(self) -> None:
        """A signal ends it at once."""
        if self._has_begun and self.run_dir is not None:
            self._say(journal.ENDED, self.run_dir, journal.STOPPED, error="stopped by a signal")

    def _event(self, event: str, run_dir: Path, status: str | None = None, **fields: Any) -> journal.JobEvent:
        return journal.JobEvent(
            event=event,
            job=self._number,
            folder=Path(os.path.relpath(run_dir, self.sweep.folder)).as_posix(),
            hash=self._hash,
            overrides=self._overrides,
            status=status,
            trackers=ids_in(run_dir) if event == journal.ENDED else {},
            **fields,
        )

    def _say(self, event: str, run_dir: Path, status: str | None = None, **fields: Any) -> None:
        self.sweep.journal.append(self._event(event, run_dir, status, **fields))
        if (current := driven_sweep()) is not None:
            current[1].look()


def objective_in(result: dict[str, Any], status: str, names: Sequence[str]) -> tuple[Value, str | None]:
    """The value of a job for a sweeper, a list if there are several objectives, and the reason if there is none though
    the job did well. A trial without a value has failed."""
    if status not in (journal.COMPLETED, journal.PRUNED, journal.STOPPED):
        return None, None
    try:
        values = [value_in(result, name) for name in names]
    except LookupError as error:
        return None, f"sweep.objective: {error.args[0]}"
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None, None
    return (numbers[0] if len(numbers) == 1 else numbers), None


def read_fate(run_dir: Path, overrides: Sequence[str], names: Sequence[str]) -> tuple[str | None, Value]:
    """The status and the value of a job by its result.json; None if none can be read, or it is of another job."""
    with suppress(OSError, UntrustedFileError):
        result = read_result(run_dir / RESULT_NAME)
        if result["overrides"] == [*overrides]:
            return (status := journal.outcome(result)), objective_in(result, status, names)[0]
    return None, None


# Devices for jobs side by side on one machine: each has its own, and gives them back when it ends or is killed.


SLOTS = ".slots"
"""Folder of the locks, in the sweep's folder."""
_LOOK_EVERY_S = 0.2


@contextmanager
def devices_of_own(sweep: Sweep, config: Config) -> Iterator[None]:
    """Inside, this process and its ranks see devices of their own, free of other jobs of the sweep on this machine:
    GPUs if they train on these, else an equal share of the CPU's cores. Waits until there are enough.

    A job alone on its machine has all of them, and none is locked.
    """
    if sweep.num_at_once == 1:
        yield
        return
    gpus = [] if config.launch.device == "cpu" else visible_gpus()
    num_gpus = config.launch.nproc_per_node or max(1, len(gpus) // sweep.num_at_once)
    with ExitStack() as stack:
        folder = sweep.folder / SLOTS / socket.gethostname()
        folder.mkdir(parents=True, exist_ok=True)
        if num_gpus <= len(gpus):
            stack.enter_context(only_gpus(_lock_free(folder, gpus, num_gpus, stack)))
        else:
            slots = [f"cores_{number}" for number in range(sweep.num_at_once)]
            [slot] = _lock_free(folder, slots, 1, stack)
            stack.enter_context(_only_cores(int(slot.removeprefix("cores_")), sweep.num_at_once))
        yield


def _lock_free(folder: Path, names: Sequence[str], num: int, stack: ExitStack) -> list[str]:
    """So many of the names, locked; all at once, so that no two jobs wait for each other."""
    while True:
        with ExitStack() as held, open_lock(folder / "all") as all_of_them:
            lock(all_of_them, wait=True)
            got: list[str] = []
            for name in names:
                file = held.enter_context(open_lock(folder / name.replace("/", "_")))
                try:
                    lock(file)
                except BlockingIOError:
                    continue
                got.append(name)
                if len(got) == num:
                    stack.push(held.pop_all())
                    return got
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def _only_cores(number: int, num: int) -> Iterator[None]:
    """Inside, this process has one of `num` equal shares of its cores; several jobs have the same if there are fewer
    cores."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    previous = os.sched_getaffinity(0)
    cores = sorted(previous)
    share = max(1, len(cores) // num)
    os.sched_setaffinity(0, {cores[(number * share + offset) % len(cores)] for offset in range(share)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous)
