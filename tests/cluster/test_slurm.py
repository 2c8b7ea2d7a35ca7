"""A run in a real Slurm: however a job is stopped, it saves in the step that runs, is queued again once, goes on in its
folder, and ends with the weights of the run that nobody disturbed. Needs root, slurmd and munge: `make cluster`."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import free_port, result_of

from tests.cluster.jobs import (
    FOUR_TASKS,
    LAUNCH,
    LAUNCH_PY,
    RUN,
    TORCHRUN,
    Job,
    assert_went_on,
    is_over,
    preempt,
    scancel,
    until,
)

pytestmark = pytest.mark.usefixtures("in_slurm")


@pytest.mark.parametrize("signum", ["USR1", "USR2"])
def test_tasks_of_two_nodes_get_a_signal_at_once(tmp_path: Path, undisturbed_job: str, signum: str):
    job = Job.submit(tmp_path, FOUR_TASKS, f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    job.await_training()
    scancel(job, signum)
    assert_went_on(job, f"SIG{signum}", undisturbed_job)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [f"slurm-{job.number}"]
    assert result_of(job.run_dir)["world_size"] == 4


@pytest.mark.parametrize("limit", [("--time=1",), ("--time=2", "--signal=USR1@20")], ids=["SIGTERM", "USR1 before"])
def test_a_time_limit(tmp_path: Path, undisturbed_job: str, limit: tuple[str, ...]):
    """Slurm may send the signal a minute earlier than it was asked to."""
    job = Job.submit(tmp_path, ("-n2", *limit), f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true")
    assert_went_on(job, "SIGUSR1" if len(limit) > 1 else "SIGTERM", undisturbed_job)


def test_an_array_of_four_is_preempted_and_each_is_queued_again_once(tmp_path: Path, undisturbed_job: str):
    command = f"exec srun {LAUNCH} {' '.join(RUN)} launch.requeue=true"
    number = Job.submit(tmp_path, ("--array=1-4", "-N1", "-n2"), command).number
    jobs = [Job(tmp_path, f"{number}_{task}") for task in (1, 2, 3, 4)]
    for job in jobs:
        job.await_training()
    preempt(3)
    for job in jobs:
        assert_went_on(job, "SIGTERM", undisturbed_job)


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


@pytest.mark.parametrize(
    ("num_nodes", "heeds"), [(1, ""), (2, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")], ids=["dies", "two nodes"]
)
def test_torchrun_loses_no_step_whether_it_dies_of_the_signal_or_heeds_it(tmp_path, undisturbed_job, num_nodes, heeds):
    per_node = 4 // num_nodes
    meeting = f"--nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --rdzv-id job"
    torchrun = f"srun {TORCHRUN} {meeting} {heeds} --nproc-per-node {per_node}"
    nodes = (f"-N{num_nodes}", "--ntasks-per-node=1", f"-c{per_node}")
    settings = f"{' '.join(RUN)} checkpoint.resume=auto"
    ended = f"{sys.executable} -m zerotrain ended outputs/slurm-$SLURM_JOB_ID"
    job = Job.submit(tmp_path, nodes, f"{torchrun} {LAUNCH_PY} {settings}", ended)
    job.await_training()
    scancel(job, "USR1")
    job.await_state("FAILED")
    assert job.shown("ExitCode") == "85:0"
    result = result_of(job.run_dir)
    assert (result["status"], result["world_size"]) == ("stopped", 4)
    assert [path.name for path in job.run_dir.glob("checkpoints/*")] == [f"step-{result['steps']:08d}"]
    (tmp_path / "go_on").touch()
    again = f"exec {torchrun} {LAUNCH_PY} {settings} hydra.run.dir={job.run_dir}"
    Job.submit(tmp_path, nodes, again).await_state("COMPLETED")
    assert result_of(job.run_dir)["weights_sha256"] == undisturbed_job


def test_a_job_whose_first_node_dies_goes_on_from_its_newest_checkpoint(slurm, tmp_path, undisturbed_job) -> None:
    """All of the node dies at once: its slurmd, the script of the job and the tasks. Slurm queues the job again."""
    command = f"exec srun {LAUNCH} {' '.join(RUN)} checkpoint.every=2 launch.requeue=true"
    job = Job.submit(tmp_path, FOUR_TASKS, command)
    until(lambda: list(job.run_dir.glob("checkpoints/step-*/manifest.json")), job)
    node = job.shown("BatchHost")
    found = list(psutil.process_iter(["cmdline", "name"]))  # null for one that is just ending
    [slurmd] = [each for each in found if (each.info["cmdline"] or [])[:3] == ["slurmd", "-N", node]]
    steps = [each for each in found if each.info["name"] == "slurmstepd" and _is_of(each, job, node)]
    assert len(steps) == 2  # of the script, and of its tasks
    for process in [slurmd, *(each for step in steps for each in (step, *step.children(recursive=True)))]:
        process.send_signal(signal.SIGKILL)
    (tmp_path / "go_on").touch()
    subprocess.run(["scontrol", "update", f"node={node}", "state=DOWN", "reason=killed"], check=True)
    try:
        until(lambda: is_over(job), job)
    finally:
        subprocess.run(["slurmd", "-N", node], check=True)  # it is back when it has registered: ReturnToService=2
    result = result_of(job.run_dir)
    assert "step-" in result["resumed_from"]
    assert result["weights_sha256"] == undisturbed_job
    assert job.shown("Restarts") == "1"


def _is_of(step: psutil.Process, job: Job, node: str) -> bool:
    """Whether a slurmstepd runs a step of the job on a node. The title that it gives itself has the job alone."""
    told = {"SLURM_JOB_ID": job.number, "SLURMD_NODENAME": node}
    return any(told.items() <= each.environ().items() for each in step.children())


def test_the_command_slurm_submits_a_run(tmp_path: Path, undisturbed_job: str):
    (tmp_path / "go_on").touch()
    options = ["--submit", "--parsable", "--ntasks=4", "--time=10", "--"]
    command = [sys.executable, "-m", "zerotrain", "slurm", *options, *RUN]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True)
    job = Job(tmp_path, done.stdout.strip())
    job.await_state("COMPLETED")
    assert result_of(job.run_dir)["weights_sha256"] == undisturbed_job
