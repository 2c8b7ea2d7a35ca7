"""The folder of a job of a sweep: the one that holds the job already, found by its settings and not by its number, or
one of its own, which holds nothing of another job."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, named_as_steps
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.files.lock import LOCK_NAME, is_held
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching.job import CONFIG_NAME, FolderInUseError, holding_job, locked
from zerotrain.launching.resuming import holds
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.report.journal import (
    COMPLETED,
    DIVERGED,
    FAILED,
    PRUNED,
    REFUSED,
    STOPPED,
    Book,
    Identity,
    JobEvent,
    outcome,
)
from zerotrain.training.result import RESULT_NAME, read_result


@dataclass(frozen=True, kw_only=True)
class JobPlace:
    """A job's folder, locked by this process but where the job runs elsewhere."""

    run_dir: Path
    taken: dict[str, Any] | None = None
    """The result in it, if the job is to be left as it is."""
    goes_on: bool = False
    """Whether it has checkpoints there to go on from."""
    runs_elsewhere: bool = False
    """Whether another process runs the job there."""


@dataclass(frozen=True, kw_only=True)
class WantedPlace:
    """A job that looks for its place."""

    sweep: Sweep
    identity: Identity
    config: Config | None
    """None: its settings could not be read."""
    named: Path
    """The folder that `hydra.sweep.subdir` names."""
    may_move: bool
    """Whether that is the number of the job, for which another folder does as well."""


def take_place(wanted: WantedPlace, book: Book, stack: ExitStack) -> JobPlace:
    """Find the folder of a job and lock it, while the journal is locked, so that no two jobs find the same.

    Args:
        stack: gets the folder's lock.

    Raises:
        ConfigError: another job has the folder that the user has named for it, or that cannot be written.
    """
    place = _found(wanted, book, stack)
    if place.run_dir != wanted.named:
        with suppress(OSError):  # Hydra has made it; it stays where it holds something
            wanted.named.rmdir()
    return place


def _found(wanted: WantedPlace, book: Book, stack: ExitStack) -> JobPlace:
    named, note = wanted.named, " ".join([wanted.identity.hash or "-", *wanted.identity.values])
    erases = wanted.config is not None and wanted.config.launch.overwrite
    if erases or not wanted.may_move:
        _require_unclaimed(wanted)
    if (in_use := _running(wanted, note)) is not None:
        return JobPlace(run_dir=in_use, runs_elsewhere=True)
    for run_dir, last in [(named, None)] if erases else list(_candidates(wanted, book.events())):
        try:
            stack.enter_context(locked(run_dir, job=note))
        except FolderInUseError:
            if last is not None or holding_job(run_dir) == note:
                return JobPlace(run_dir=run_dir, runs_elsewhere=True)
            if not wanted.may_move:
                raise
            continue
        place = JobPlace(run_dir=run_dir) if erases else _judged(wanted, run_dir, last)
        if place is not None:
            return place
        stack.close()
    for number in itertools.count(2):
        run_dir = named.with_name(f"{named.name}_{number}")
        with suppress(FileExistsError):
            run_dir.mkdir()
            stack.enter_context(locked(run_dir, job=note))
            break
    return JobPlace(run_dir=run_dir)


def _running(wanted: WantedPlace, note: str) -> Path | None:
    """The folder in which another process runs the job. It counts from the moment that the process has the folder: what
    the journal says of that, and the config there, come later."""
    if wanted.identity.hash is None:
        return None
    locks = {wanted.named / LOCK_NAME, *wanted.sweep.folder.glob(f"*/{LOCK_NAME}")}
    return next((each.parent for each in sorted(locks) if is_held(each) and holding_job(each.parent) == note), None)


def _require_unclaimed(wanted: WantedPlace) -> None:
    """With hydra.sweep.subdir=same the second job erased the first (2026-11-21)."""
    for event in wanted.sweep.events():
        if wanted.sweep.folder / event.folder == wanted.named and not event.is_of(wanted.identity):
            raise ConfigError(
                f"hydra.sweep.subdir: got {wanted.named.name}, which job {event.job} uses too; each job needs a folder "
                "of its own; the default is ${hydra:job.num}"
            )


def _candidates(wanted: WantedPlace, events: list[JobEvent]) -> Iterator[tuple[Path, JobEvent | None]]:
    """Folders that may hold the job, with the last that was said of it there; behind them its own, if that is free."""
    sweep, config = wanted.sweep, wanted.config
    own: dict[Path, JobEvent] = {}
    for event in reversed(sweep.events() if sweep.again == "all" else events):
        if event.is_within and event.is_of(wanted.identity):
            own.setdefault(sweep.folder / event.folder, event)
    for run_dir, event in own.items():
        if run_dir.is_dir() and config is not None and holds(config, run_dir) is not False:
            yield run_dir, event
    if wanted.named in own:
        return
    of_named = [event for event in events if sweep.folder / event.folder == wanted.named]
    if of_named:
        was_refused = of_named[-1].event == REFUSED and not os.path.lexists(wanted.named / CONFIG_NAME)
        is_free = was_refused or of_named[-1].is_of(wanted.identity)
    else:
        is_free = config is None or holds(config, wanted.named) is not False
    if sweep.again == "all" and os.path.lexists(wanted.named / CONFIG_NAME):
        is_free = False
    if is_free or not wanted.may_move:
        yield wanted.named, None


def _judged(wanted: WantedPlace, run_dir: Path, last: JobEvent | None) -> JobPlace | None:
    """The place that a folder is to a job; None where it completed there and is to run again: that is never erased."""
    has_checkpoints = bool(named_as_steps(run_dir / CHECKPOINTS))
    going_on = JobPlace(run_dir=run_dir, goes_on=has_checkpoints)
    if wanted.config is None or (last is None and not holds(wanted.config, run_dir)):
        return JobPlace(run_dir=run_dir)
    try:
        result = read_result(run_dir / RESULT_NAME)
    except (OSError, UntrustedFileError):  # none yet, or one that the checks of the folder refuse
        return going_on
    status = outcome(result, None if last is None else last.status)
    keeps_failed = wanted.sweep.again == "none" or not wanted.may_move
    if status in (COMPLETED, PRUNED) or (status == DIVERGED and result["status"] == COMPLETED and keeps_failed):
        return JobPlace(run_dir=run_dir, taken=result)
    if status in (FAILED, DIVERGED) and wanted.sweep.again == "none":
        return JobPlace(run_dir=run_dir, taken=result)
    if result["status"] == COMPLETED:
        return None
    assert status in (FAILED, DIVERGED, STOPPED)
    return going_on
