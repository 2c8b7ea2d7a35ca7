"""Starting the ranks of a run again after a failure, from its newest checkpoint."""

from dataclasses import replace
from pathlib import Path

from zerotrain.checkpoint.folder import CHECKPOINTS, newest_first, step_of
from zerotrain.launching.end.failures import RunError
from zerotrain.launching.job.job import Job
from zerotrain.launching.job.resuming import stages_to_come
from zerotrain.training.callbacks.stages import stage_at

MAX_IN_VAIN = 2
"""Restarts in a row without a newer checkpoint, after which there is no other: the next would fail where they did."""


class Attempts:
    """The attempts at a job, one after the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        """As the ranks of the present attempt are told it."""
        self._in_vain = 0
        self._newest = newest_step(job.run_dir)

    def begin_next(self, error: RunError) -> str:
        """Make the folder ready for another attempt, after the failure of the present one; return a line that says so.

        Raises:
            RunError: there is no other; the same failure, and why.
        """
        allowed, newest = self.job.config.launch.max_restarts, newest_step(self.job.run_dir)
        if self.job.restarts:
            self._in_vain = self._in_vain + 1 if newest == self._newest else 0
        self._newest = newest
        if not allowed or not self.job.ranks_dir.is_dir():
            raise error
        if self._in_vain >= MAX_IN_VAIN:
            raise RunError(f"{error}\n  gave up: the last {MAX_IN_VAIN} restarts wrote no newer checkpoint")
        if self.job.restarts >= allowed:
            raise RunError(f"{error}\n  given up: launch.max_restarts={allowed}")
        self.job = going_on(replace(self.job, restarts=self.job.restarts + 1))
        self.job.open_folder()
        cause, *more = str(error).splitlines()
        place = place_of_restart(self.job.run_dir)
        return "\n".join([f"{cause}; restart {self.job.restarts} of {allowed} from {place}", *more])


def newest_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint that a run has saved in its folder; None where there is none."""
    found = newest_first(run_dir / CHECKPOINTS)
    return step_of(found[0]) if found else None


def place_of_restart(run_dir: Path) -> str:
    """The place where a run resumes after a restart, for people."""
    newest = newest_step(run_dir)
    return "the start" if newest is None else f"step {newest}"


def going_on(job: Job) -> Job:
    """The job as it goes on after a restart: from the newest checkpoint of its own folder, where there is one; if not,
    as it began the first time."""
    found = newest_first(job.run_dir / CHECKPOINTS)
    if not found:
        return job
    stage = stage_at(*stages_to_come(job.config, found))
    return replace(job, resume_from=[str(path) for path in found], stage=stage)
