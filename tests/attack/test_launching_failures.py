"""However a run ends, the user reads the first cause, the exit code says it, and no process is left."""

import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from commands import MISBEHAVING, TINY, TWO_RANKS, result_of

SIGNALLED = (
    "data: Order, position and loading",
    "a signal to stop to all processes, once or twice, `kill -9` of a rank or of the launcher, an item that takes for "
    "ever",
)


def told(signum: signal.Signals) -> str:
    """What the first signal is answered."""
    return f"{signum.name}: the running step ends, then the run; once more stops at once"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_and_is_what_the_user_reads(launch, tmp_path: Path, rank: int):
    command = launch(*MISBEHAVING, "+model.action=raise", f"+model.rank={rank}", TWO_RANKS, folder=tmp_path)
    log = tmp_path / f"run/ranks/{rank}.log"
    command.require_failed(told := f"rank {rank} failed: ValueError: the third batch is unlucky\n  its log: {log}")
    assert command.stderr == f"{told}\n"
    assert "Traceback" in log.read_text()


SAVING = ("launch.nproc_per_node=3", "zero.stage=3", "checkpoint.every=1", "checkpoint.asynchronous=false")


@pytest.mark.parametrize("settings", [(TWO_RANKS,), SAVING], ids=["2", "3"])
def test_a_killed_rank_ends_all_and_is_named_with_its_signal(launch, settings: tuple[str, ...], tmp_path: Path):
    """If there is a checkpoint, the last line says how to go on."""
    command = launch(*MISBEHAVING, "+model.action=kill", *settings, folder=tmp_path)
    command.require_failed("rank 1 was killed by SIGKILL")
    _, log, *to_go_on = command.stderr.splitlines()
    assert log == f"  its log: {tmp_path / 'run/ranks/1.log'}"
    wanted = [r"to go on from step-0000000[12]: python \S+ .*hydra.run.dir=run .*checkpoint.resume=auto"]
    assert len(to_go_on) == (len(wanted) if settings == SAVING else 0)
    assert all(re.fullmatch(each, line) for each, line in zip(wanted, to_go_on, strict=False))


def test_under_torchrun_the_first_cause_comes_before_torchruns_own_report(torchrun, tmp_path: Path):
    command = torchrun(*MISBEHAVING, "+model.action=raise", folder=tmp_path)
    command.require_failed("rank 1 failed: ValueError: the third batch is unlucky")
    assert "ValueError: the third batch is unlucky" in command.stderr.partition("Root Cause")[2]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_under_torchrun_a_run_that_is_stopped_at_once_says_so_in_its_result(
    torchrun, tmp_path: Path, signum: signal.Signals
):
    command = torchrun(*MISBEHAVING, "+model.action=sleep", folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    command.stop_at_once(signum)
    assert command.wait() != 0
    result = result_of(tmp_path / "run")
    assert result["status"] == "stopped", result["error"]
    assert command.wait_until_gone() == []


def test_under_torchrun_a_killed_rank_ends_all(torchrun, tmp_path: Path):
    command = torchrun(*MISBEHAVING, "+model.action=kill", folder=tmp_path)
    assert command.wait() == 1
    root_cause = command.stderr.partition("Root Cause")[2]
    assert "Signal 9 (SIGKILL)" in root_cause
    # Torchrun ends the other ranks by SIGTERM, which to them is a stop if it comes before they miss the killed one.
    result = result_of(tmp_path / "run")
    assert result["status"] == "failed", result["error"]
    cause = (
        "rank 1 was killed or exited without an error message in training misbehaving.MisbehavingMLP, before its work"
    )
    assert result["error"].startswith(cause)
    assert cause in command.stderr.partition("Root Cause")[0]
    assert command.wait_until_gone() == []


def test_a_run_stopped_by_its_numbers_names_the_rank_and_the_parameter(launch, tmp_path: Path):
    arguments = ("+model.action=poison", "train.on_nonfinite=stop", "zero.stage=3", TWO_RANKS)
    command = launch(*MISBEHAVING, *arguments, folder=tmp_path)
    assert command.wait() == 1
    cause, _log = command.stderr.splitlines()
    named = re.match(r"rank ([01]) failed: TrainingError: the gradient was not finite; lower optimizer\.lr, ", cause)
    assert cause.endswith("In the backward it was first nan in head.bias; the loss was nan on rank 1")
    assert result_of(tmp_path / "run")["status"] == "failed"
    # Both ranks fail by themselves; the first to say so ends the other, which may have written nothing yet.
    assert "TrainingError" in (tmp_path / f"run/ranks/{named[1]}.log").read_text()
    assert command.wait_until_gone() == []


def test_ctrl_c_twice_stops_a_sweep_at_once(launch, tmp_path: Path):
    sweep = ("-m", *TINY, "model._target_=misbehaving.MisbehavingMLP", "hydra.sweep.dir=sweep")
    command = launch(*sweep, "+model.action=sleep", "zero.stage=1,2", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "sweep/0/ranks/1.log", "asleep")
    command.stop_at_once(signal.SIGINT)
    assert command.wait() == 130
    assert command.stderr.splitlines() == [told(signal.SIGINT), "stopped by Ctrl-C"]
    assert "job 0 stopped" in command.stdout
    assert result_of(tmp_path / "sweep/0")["status"] == "stopped"
    assert not (tmp_path / "sweep/1").exists()
    assert command.wait_until_gone() == []


@pytest.mark.case("stopping", "a second signal", "all end at once")
@pytest.mark.case(*SIGNALLED)
def test_sigterm_twice_stops_a_run_at_once_which_says_so_in_its_result(launch, tmp_path: Path):
    """It comes to all processes, also to those that read data."""
    command = launch(*MISBEHAVING, "+model.action=sleep", "data.num_workers=1", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    command.stop_at_once(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert command.stderr.splitlines() == [told(signal.SIGTERM), "stopped by SIGTERM"]
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_by"]) == ("stopped", None)
    assert command.wait_until_gone() == []


@pytest.mark.case(*SIGNALLED)
def test_the_ranks_end_with_a_parent_that_was_killed(launch, tmp_path: Path):
    """And with them the processes that read data for them, and the folder they met in."""
    places = Path(tempfile.mkdtemp(dir="/tmp"))  # short: torch has sockets there
    options = ("+model.action=sleep", "data.num_workers=1", TWO_RANKS)
    command = launch(*MISBEHAVING, *options, folder=tmp_path, TMPDIR=str(places))
    command.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    assert [path.name.startswith("zerotrain_") for path in places.iterdir()].count(True) == 1
    command.kill()
    assert command.wait() == -signal.SIGKILL
    assert command.wait_until_gone() == []
    assert [path.name for path in places.iterdir() if path.name.startswith("zerotrain_")] == []
    shutil.rmtree(places)


def test_under_torchrun_a_problem_is_told_once(torchrun, tmp_path: Path):
    command = torchrun(*TINY, "zero.stage=5", folder=tmp_path)
    assert command.wait() == 1
    assert (command.stdout + command.stderr).count("zero.stage: got 5") == 1
    assert command.wait_until_gone() == []
