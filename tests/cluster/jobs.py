"""Jobs of a real Slurm whose run waits until it may go on, and what is promised of one that was stopped."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from commands import REPOSITORY, TINY, result_of

LIMIT_S = 400.0
RUN = (
    *TINY,
    "model._target_=waiting.WaitingMLP",
    "train.max_steps=200",
    "train.virtual_ranks=4",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=null",
)
"""4, 2 or 1 ranks train it to the same bits."""
LAUNCH_PY = str(REPOSITORY / "launch.py")
LAUNCH = f"{sys.executable} {LAUNCH_PY}"
TORCHRUN = f"{sys.executable} -m torch.distributed.run"
FOUR_TASKS = ("-N2", "--ntasks-per-node=2")


def num_steps(run_dir: Path) -> int:
    """Steps that a run has logged."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    return max((json.loads(line).get("step", 0) for line in path.read_text().splitlines()), default=0)


class Job:
    """A job of one script, in a folder of its own."""

    def __init__(self, folder: Path, number: str) -> None:
        self.folder, self.number = folder, number
        self.run_dir = folder / f"outputs/slurm-{number}"
        self.output = folder / f"slurm-{number}.out"

    @classmethod
    def submit(cls, folder: Path, options: tuple[str, ...], *commands: str) -> "Job":
        script = "\n".join(["#!/bin/bash", *commands, ""])
        command = ["sbatch", "--parsable", "--partition=low", "--requeue", "--open-mode=append", *options]
        done = subprocess.run(command, cwd=folder, input=script, text=True, capture_output=True, check=True)
        return cls(folder, done.stdout.strip())

    def await_text(self, path: Path, pattern: str) -> re.Match[str]:
        return until(lambda: re.search(pattern, path.read_text() if path.exists() else ""), self)

    def await_training(self) -> None:
        self.await_text(self.run_dir / "ranks/0.log", "step 1/")

    def shown(self, name: str) -> str:
        done = subprocess.run(["scontrol", "show", "job", self.number], text=True, capture_output=True, check=True)
        found = re.search(rf"\b{name}=(\S*)", done.stdout)
        assert found is not None
        return found[1]

    def begin_at_once(self) -> None:
        """Begin a job that is queued again, for which Slurm would wait for two minutes, and let it take its time."""
        if self.shown("JobState") == "PENDING" and self.shown("Reason") == "BeginTime":
            subprocess.run(["scontrol", "update", f"job={self.number}", "StartTime=now", "TimeLimit=30"])

    def await_state(self, state: str) -> None:
        until(lambda: self.shown("JobState") == state, self)


def until(holds: Callable[[], object], job: Job) -> object:
    deadline = time.monotonic() + LIMIT_S
    while not (found := holds()):
        said = job.output.read_text() if job.output.exists() else ""
        assert time.monotonic() < deadline, f"{job.shown('JobState')}: {said}"
        time.sleep(0.2)
    return found


def scancel(job: Job, signum: str) -> None:
    subprocess.run(["scancel", f"--signal={signum}", job.number], check=True)


def preempt(num_nodes: int) -> None:
    """A job of a higher partition takes the place of all others for a moment."""
    command = ["sbatch", "--partition=all", f"-N{num_nodes}", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3"]
    subprocess.run(command, check=True, capture_output=True)


def is_over(job: Job) -> bool:
    """Whether a job has completed. One that is queued again is begun at once."""
    job.begin_at_once()
    return job.shown("JobState") == "COMPLETED"


def assert_went_on(job: Job, by: str, undisturbed: str) -> None:
    """The job was stopped by this signal, saved in that step, and queued again once; its weights are those of the run
    that nobody stopped."""
    step = int(job.await_text(job.output, rf"stopped by {by} after step (\d+) of 200; in outputs/slurm-")[1])
    assert f"to go on: scontrol requeue {job.number}; when " in job.output.read_text()
    (job.folder / "go_on").touch()
    until(lambda: is_over(job), job)
    result = result_of(job.run_dir)
    assert result["resumed_from"].endswith(f"step-{step:08d}")
    assert result["weights_sha256"] == undisturbed
    assert job.shown("Restarts") == "1"
    assert "SLURM_RESTART_COUNT=1: checkpoint.resume=auto" in job.output.read_text()
