"""A run in a job of a scheduler, which stops it and starts it again: its folder, its exit code, and no step is lost."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import MISBEHAVING, PATIENT, TINY, TWO_RANKS, Command, by_torchrun, result_of

from tests.zygote.client import Zygote

JOB = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}
FOLDER = "outputs/slurm-11_3"
STOPS_IN_STEP_2 = ("model._target_=misbehaving.MisbehavingMLP", "+model.action=terminate", "+model.rank=1")


def scheduled(launch: Callable[..., Command], folder: Path, *settings: str, **environment: str) -> Command:
    return launch(*TINY, PATIENT, TWO_RANKS, "train.max_steps=4", *settings, folder=folder, **environment)


def code_of(zygote: Zygote, folder: Path, run: str) -> int:
    return zygote.run(["ended", run], folder, module="zerotrain").code


@pytest.mark.case(
    "stopping",
    "a job of Slurm is stopped and queued again, given `launch.overwrite=true` or not",
    "exit code 85; it goes on in its folder, to the bits of the run that never stopped; a third start changes nothing",
)
def test_a_job_that_is_queued_again_is_the_run_that_never_stopped(launch, zygote: Zygote, tmp_path: Path):
    stopped = scheduled(launch, tmp_path, *STOPS_IN_STEP_2, "launch.overwrite=true", **JOB)
    assert stopped.wait() == 85, stopped.stderr
    result = result_of(tmp_path / FOLDER)
    assert (result["status"], result["steps"], result["exit_code"]) == ("stopped", 2, 85)
    assert code_of(zygote, tmp_path, FOLDER) == 85
    well = ("model._target_=misbehaving.MisbehavingMLP", "+model.action=none")
    goes_on = (*well, "launch.overwrite=true")
    again = scheduled(launch, tmp_path, *goes_on, **JOB, SLURM_RESTART_COUNT="1")
    assert again.wait() == 0, again.stderr
    assert again.stdout.startswith("SLURM_RESTART_COUNT=1: checkpoint.resume=auto\n")
    third = scheduled(launch, tmp_path, *goes_on, **JOB, SLURM_RESTART_COUNT="2")
    assert third.wait() == 0, third.stderr
    assert "holds this run already, and it is completed; nothing is changed" in third.stdout
    never = scheduled(launch, tmp_path, *well, "hydra.run.dir=never")
    assert never.wait() == 0, never.stderr
    result = result_of(tmp_path / FOLDER)
    assert result["resumed_from"].endswith("step-00000002")
    assert result["weights_sha256"] == result_of(tmp_path / "never")["weights_sha256"]
    assert code_of(zygote, tmp_path, FOLDER) == code_of(zygote, tmp_path, "never") == 0


@pytest.mark.case(
    "stopping",
    "a signal that torchrun does not handle, such as SIGUSR1, to it and its ranks at once",
    "torchrun dies with its store; the ranks save all the same; `zerotrain ended` tells 85",
)
def test_ranks_whose_torchrun_dies_of_the_signal_that_stops_them_save(zygote: Zygote, tmp_path: Path):
    settings = ("hydra.run.dir=run", PATIENT, "train.max_steps=10000000", "launch.exit_code_when_stopped=85")
    command = by_torchrun(*TINY, *settings, folder=tmp_path, zygote=zygote)
    command.wait_for_text(tmp_path / "run/ranks/0.log", "step 1/")
    ranks = [command.pid_of_rank(tmp_path / "run", rank) for rank in range(2)]
    for pid in (command.process.pid, *ranks):
        os.kill(pid, signal.SIGUSR1)
    assert command.wait_until_gone() == []
    result = result_of(tmp_path / "run")
    assert (result["status"], result["exit_code"]) == ("stopped", 85), result["error"]
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == [f"step-{result['steps']:08d}"]
    assert code_of(zygote, tmp_path, "run") == 85
    assert "frame #" not in command.stderr
    refused = by_torchrun(*TINY, *settings, "checkpoint.resume=auto", "seed=-1", folder=tmp_path, zygote=zygote)
    assert refused.wait() == 1  # torchrun's own
    assert code_of(zygote, tmp_path, "run") == 2
    assert result_of(tmp_path / "run") == result


@pytest.mark.case("stopping", "a job of a scheduler that control.yaml stops, or that fails", "exit code 0, or 1")
@pytest.mark.parametrize(("action", "code"), [("raise", 1), ("none", 0)])
def test_only_a_signal_lets_a_scheduler_try_again(launch, zygote: Zygote, tmp_path: Path, action: str, code: int):
    (tmp_path / "run").mkdir()
    if action == "none":
        (tmp_path / "run/control.yaml").write_text("stop: true")
    settings = (*MISBEHAVING, f"+model.action={action}", TWO_RANKS)
    command = launch(*settings, folder=tmp_path, JOB_COMPLETION_INDEX="0")
    assert command.wait() == code
    assert code_of(zygote, tmp_path, "run") == code
