"""A run in a real Slurm: however a job is stopped, it saves in the step that runs, is queued again once, goes on in its
folder, and ends with the weights of the run that nobody disturbed. Needs root, slurmd and munge: `make cluster`."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, result_of

HERE = Path(__file__).resolve().parent
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
LAUNCH = f"{sys.executable} {REPOSITORY / 'launch.py'}"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {REPOSITORY / 'launch.py'}"
FOUR_TASKS = ("-N2", "--ntasks-per-node=2")


@pytest.fixture(scope="session", autouse=True)
def inside(slurm: str) -> None:
    """Commands of this module find the Slurm, zerotrain and the model that waits."""
    os.environ |= {"SLURM_CONF": slurm, "PYTHONPATH": f"{REPOSITORY}:{HERE}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def undisturbed(inside: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights of the run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go_on").touch()
    command = [*LAUNCH.split(), *RUN, "hydra.run.dir=run", "launch.nproc_per_node=2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return str(result_of(folder / "run")["weights_sha256"])


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
    """Whether a job has completed. One that is queued again is begun at once: Slurm would wait for two minutes."""
    state = job.shown("JobState")
    if state == "PENDING" and job.shown("Reason") == "BeginTime":
        subprocess.run(["scontrol", "update", f"job={job.number}", "StartTime=now"])
    return state == "COMPLETED"


def assert_went_on(job: Job, by: str, undisturbed: str) -> None:
    """The job was stopped by this signal, saved in that step, and queued again once; its weights are those of the run
    that nobody stopped."""
    step = int(job.await_text(job.output, rf"stopped by {by} after step (\d+) of 200; in outputs/slurm-")[1])
    (job.folder / "go_on").touch()
    until(lambda: is_over(job), job)
    result = result_of(job.run_dir)
    assert result["resumed_from"].endswith(f"step-{step:08d}")
    assert result["weights_sha256"] == undisturbed
    assert job.shown("Restarts") == "1"
    assert "SLURM_RESTART_COUNT=1: checkpoint.resume=auto" in job.output.read_text()


@pytest.mark.parametrize("signum", ["USR1", "USR2"])
def test_tasks_of_two_nodes_get_a_signal_at_once(tmp_path: Path, undisturbed: str, signum: str):
    job = Job.submit(tmp_path, FOUR_TASKS, f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    job.await_training()
    scancel(job, signum)
    assert_went_on(job, f"SIG{signum}", undisturbed)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [f"slurm-{job.number}"]
    assert result_of(job.run_dir)["world_size"] == 4


@pytest.mark.parametrize("limit", [("--time=1",), ("--time=2", "--signal=USR1@20")], ids=["SIGTERM", "USR1 before"])
def test_a_time_limit(tmp_path: Path, undisturbed: str, limit: tuple[str, ...]):
    """Slurm may send the signal a minute earlier than it was asked to."""
    job = Job.submit(tmp_path, ("-n2", *limit), f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    assert_went_on(job, "SIGUSR1" if len(limit) > 1 else "SIGTERM", undisturbed)


def test_a_job_that_a_higher_partition_preempts(tmp_path: Path, undisturbed: str):
    job = Job.submit(tmp_path, FOUR_TASKS, f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    job.await_training()
    preempt(3)
    assert_went_on(job, "SIGTERM", undisturbed)


def test_an_array_of_two_is_preempted_and_each_is_queued_again_once(tmp_path: Path, undisturbed: str):
    command = f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true"
    number = Job.submit(tmp_path, ("--array=1-2", "-N1", "-n2", "--exclusive"), command).number
    jobs = [Job(tmp_path, f"{number}_{task}") for task in (1, 2)]
    for job in jobs:
        job.await_training()
    preempt(3)
    for job in jobs:
        assert_went_on(job, "SIGTERM", undisturbed)


def test_a_cancelled_job_is_saved_and_stays_cancelled(tmp_path: Path):
    job = Job.submit(tmp_path, FOUR_TASKS, f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    job.await_training()
    subprocess.run(["scancel", job.number], check=True)
    job.await_state("CANCELLED")
    result = result_of(job.run_dir)
    assert (result["status"], result["stopped_by"], result["exit_code"]) == ("stopped", "SIGTERM", 85)
    assert [path.name for path in job.run_dir.glob("checkpoints/*")] == [f"step-{result['steps']:08d}"]


def test_without_requeue_the_code_is_85_and_a_failure_is_1_and_a_refusal_is_2(tmp_path: Path):
    stopped = Job.submit(tmp_path, ("-n2",), f"exec srun {LAUNCH} {' '.join(RUN)}")
    stopped.await_training()
    failed = Job.submit(tmp_path, ("-n2",), f"exec srun {LAUNCH} {' '.join(RUN)} +data.tokens=1")
    scancel(stopped, "USR1")
    for job, code in ((stopped, 85), (failed, 2)):
        job.await_state("FAILED")
        assert job.shown("ExitCode") == f"{code}:0"
        ended = subprocess.run([sys.executable, "-m", "zerotrain", "ended", job.run_dir], cwd=tmp_path)
        assert ended.returncode == code


def test_torchrun_that_dies_of_the_signal_loses_no_step(tmp_path: Path, undisturbed: str):
    settings = f"{' '.join(RUN)} checkpoint.resume=auto"
    ended = f"{sys.executable} -m zerotrain ended outputs/slurm-$SLURM_JOB_ID"
    job = Job.submit(tmp_path, ("-n1", "-c2"), f"srun {TORCHRUN} {settings}", ended)
    job.await_training()
    scancel(job, "USR1")
    job.await_state("FAILED")
    assert job.shown("ExitCode") == "85:0"
    assert result_of(job.run_dir)["status"] == "stopped"
    (tmp_path / "go_on").touch()
    again = f"exec srun {TORCHRUN} {settings} hydra.run.dir={job.run_dir}"
    Job.submit(tmp_path, ("-n1", "-c2"), again).await_state("COMPLETED")
    assert result_of(job.run_dir)["weights_sha256"] == undisturbed


def test_the_command_slurm_submits_a_run(tmp_path: Path, undisturbed: str):
    (tmp_path / "go_on").touch()
    options = ["--submit", "--parsable", "--ntasks=4", "--time=10", "--"]
    command = [sys.executable, "-m", "zerotrain", "slurm", *options, *RUN]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True)
    job = Job(tmp_path, done.stdout.strip())
    job.await_state("COMPLETED")
    assert result_of(job.run_dir)["weights_sha256"] == undisturbed
