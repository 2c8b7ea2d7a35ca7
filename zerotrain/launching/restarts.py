"""Starting the ranks of a run again after a failure, from its newest checkpoint."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotrain.launching.command_line import quoted
from zerotrain.launching.failures import RunError
from zerotrain.launching.job import Job

MAX_IN_VAIN = 2
"""Restarts in a row without a newer checkpoint, after which there is no other: the next would fail where they did."""
_CHECKPOINT = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"


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
            raise RunError(f"{error}\n  given up: {MAX_IN_VAIN} restarts in a row have brought no newer checkpoint")
        if self.job.restarts >= allowed:
            raise RunError(f"{error}\n  given up: launch.max_restarts={allowed}")
        self.job = resuming(replace(self.job, restarts=self.job.restarts + 1))
        self.job.open_folder()
        cause, *more = str(error).splitlines()
        place = place_of_restart(self.job.run_dir)
        return "\n".join([f"{cause}; restart {self.job.restarts} of {allowed} from {place}", *more])


def newest_step(run_dir: Path) -> int | None:
    """The step of the newest whole checkpoint that a run has saved in its folder; None where there is none."""
    found = ((_CHECKPOINT.fullmatch(path.parent.name)) for path in run_dir.glob(f"checkpoints/*/{_MANIFEST}"))
    return max((int(match[1]) for match in found if match), default=None)


def place_of_restart(run_dir: Path) -> str:
    """Where a run goes on after a restart, for people."""
    newest = newest_step(run_dir)
    return "the start" if newest is None else f"step {newest}"


def resuming(job: Job) -> Job:
    """The job as it goes on after a restart: from the newest checkpoint of its own folder, where there is one; if not,
    as it began the first time."""
    checkpoint: Any = vars(job.config).get("checkpoint")
    if checkpoint is None or newest_step(job.run_dir) is None:
        return job
    changes: dict[str, Any] = {"checkpoint": replace(checkpoint, resume="auto")}
    return replace(job, config=replace(job.config, **changes))


def resume_command(run_dir: Path, under_torchrun: bool) -> str | None:
    """What to type for a run to go on that this process has run in a folder; None where nothing is saved there."""
    if newest_step(run_dir) is None:
        return None
    program = ["-m", "zerotrain"] if Path(sys.argv[0]).name == "__main__.py" else [sys.argv[0]]
    given = [argument for argument in sys.argv[1:] if not argument.startswith("checkpoint.resume=")]
    starter = "torchrun ..." if under_torchrun else "python"
    return f"{starter} {shlex.join([*program, 'checkpoint.resume=auto', *with_run_dir(given, run_dir)])}"


def with_run_dir(arguments: list[str], run_dir: Path) -> list[str]:
    """The same command line for a job in this folder, whatever its name."""
    text = str(run_dir)
    if not re.fullmatch(r"[\w./-]+", text, re.ASCII):
        text = quoted(text)
    others = [argument for argument in arguments if not argument.startswith("hydra.run.dir=")]
    return [f"hydra.run.dir={text}", *others]
