"""A signal to stop, whoever gets it and whatever the run does just then: all ranks end their step, and the run."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import MISBEHAVING, PATIENT, TINY, TWO_RANKS, Command, by_hand, result_of

from tests.ranks.processes import HANG_S

RUN = (*TINY, "hydra.run.dir=run", PATIENT)
ENDLESS = (*RUN, "train.max_steps=10000000")
PAUSING = (*MISBEHAVING, "+model.action=pause", "train.max_steps=10000000")
SIGNALLED = ("stopping", "SIGTERM, SIGINT or SIGUSR1 to the launcher, to one rank, to all processes")


def assert_stopped_in_order(command: Command, run_dir: Path, by: str) -> None:
    result = result_of(run_dir)
    assert (result["status"], result["stopped_by"]) == ("stopped", by), result["error"]
    assert result["error"].startswith(f"stopped by {by} after step {result['steps']} of ")
    saved = [path.name for path in run_dir.glob("checkpoints/*")]
    assert saved == [f"step-{result['steps']:08d}"]
    assert command.stdout.count(f"{result['error']}; in ") == command.stdout.count("to go on: ") == 1
    assert {path.name for path in run_dir.glob("ranks/*")} == {"0.log", "1.log"}
    assert command.wait_until_gone() == []


@pytest.mark.case("stopping", "in the first step, in an evaluation", "the step that runs ends, or the next")
@pytest.mark.case(*SIGNALLED, "all ranks end the same step, then the run")
def test_sigterm_to_the_launcher_alone_in_the_first_step(launch, tmp_path: Path):
    command = launch(*PAUSING, "+model.at=1", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "pausing")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.stderr == "SIGTERM: the running step ends, then the run; once more stops at once\n"
    assert result_of(tmp_path / "run")["steps"] == 1
    assert_stopped_in_order(command, tmp_path / "run", "SIGTERM")


@pytest.mark.case("stopping", "in the first step, in an evaluation")
def test_ctrl_c_in_an_evaluation(launch, tmp_path: Path):
    """The terminal sends it to all, and the launcher passes on none that has come by itself."""
    command = launch(*PAUSING, "+model.at=0", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "pausing")
    command.send_signal_as_terminal(signal.SIGINT)
    assert command.wait() == 130
    assert result_of(tmp_path / "run")["steps"] == 1
    assert_stopped_in_order(command, tmp_path / "run", "SIGINT")


@pytest.mark.case(*SIGNALLED)
@pytest.mark.case(
    "data: Order, position and loading",
    "a signal to stop to all processes, once or twice, `kill -9` of a rank or of the launcher, an "
    "item that takes for ever",
    "as without processes that read; none is left",
)
def test_sigusr1_to_all_processes_also_to_those_that_read_data(launch, tmp_path: Path):
    command = launch(*ENDLESS, "data.num_workers=2", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/0.log", "step 1/")
    command.send_signal_as_terminal(signal.SIGUSR1)
    assert command.wait() == 0
    assert_stopped_in_order(command, tmp_path / "run", "SIGUSR1")


@pytest.mark.case(*SIGNALLED)
@pytest.mark.parametrize(
    ("action", "rank", "by", "code"), [("interrupt", 1, "SIGINT", 130), ("terminate", 0, "SIGTERM", 0)]
)
def test_a_signal_to_one_rank_alone(launch, tmp_path: Path, action: str, rank: int, by: str, code: int):
    command = launch(*MISBEHAVING, f"+model.action={action}", f"+model.rank={rank}", TWO_RANKS, folder=tmp_path)
    assert command.wait() == code
    assert command.stderr == ""
    assert result_of(tmp_path / "run")["steps"] == 2
    assert_stopped_in_order(command, tmp_path / "run", by)


@pytest.mark.case("stopping", "under torchrun, to torchrun or to a rank", "the same")
@pytest.mark.waits
def test_under_torchrun_to_torchrun_and_to_a_rank(torchrun, tmp_path: Path):
    by_torch = torchrun(*ENDLESS, folder=tmp_path)
    by_torch.wait_for_text(tmp_path / "run/ranks/0.log", "step 1/")
    by_torch.process.send_signal(signal.SIGTERM)
    assert by_torch.wait() == 1  # torchrun's own
    assert_stopped_in_order(by_torch, tmp_path / "run", "SIGTERM")
    elsewhere = "hydra.run.dir=elsewhere"  # the first has saved
    alone = torchrun(*MISBEHAVING, "+model.action=interrupt", elsewhere, folder=tmp_path)
    assert alone.wait() == 0  # another code is a failure to torchrun, and the ranks start again
    assert_stopped_in_order(alone, tmp_path / "elsewhere", "SIGINT")


@pytest.mark.case("stopping", "a sweep", "ends with its running job")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["SIGINT", "SIGTERM"])
def test_a_sweep_ends_with_the_job_that_was_told_to_stop(launch, tmp_path: Path, signum: signal.Signals, code: int):
    sweep = ("-m", *TINY, "train.max_steps=10000000", "zero.stage=1,2", "hydra.sweep.dir=sweep")
    command = launch(*sweep, TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "sweep/0/ranks/0.log", "step 1/")
    command.send_signal_as_terminal(signum)
    assert command.wait() == code
    assert f"job 0 stopped: stopped by {signum.name} after step" in command.stdout
    assert_stopped_in_order(command, tmp_path / "sweep/0", signum.name)
    assert not (tmp_path / "sweep/1").exists()


@pytest.mark.case("stopping", "before the training", "all end at once")
@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGHUP], ids=["SIGUSR1", "SIGHUP"])
@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="under nohup SIGHUP is ignored")
def test_before_the_training_a_signal_ends_all_at_once(launch, tmp_path: Path, signum: signal.Signals):
    command = launch(*RUN, "model._target_=misbehaving.SlowMLP", TWO_RANKS, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "building")
    command.process.send_signal(signum)
    assert command.wait() == 128 + signum
    assert command.stderr.splitlines()[-1] == f"stopped by {signum.name}"
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_by"]) == ("stopped", None)
    assert command.wait_until_gone() == []


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGINT], ids=["SIGUSR1", "SIGINT"])
def test_before_the_training_a_signal_to_one_rank_ends_all_at_once_too(launch, tmp_path: Path, signum: signal.Signals):
    command = launch(*RUN, "model._target_=misbehaving.SlowMLP", TWO_RANKS, "launch.max_restarts=1", folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "building")
    os.kill(command.pid_of_rank(tmp_path / "run", 1), signum)
    assert command.wait() == 128 + signum
    assert command.stderr == f"stopped by {'Ctrl-C' if signum == signal.SIGINT else signum.name}\n"
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_by"], result["restarts"]) == ("stopped", None, 0)
    assert command.wait_until_gone() == []


@pytest.mark.case("stopping", "a rank dies, or fails, while all stop", "this is the reported cause")
def test_a_rank_that_dies_while_the_others_stop_is_the_cause(launch, tmp_path: Path):
    command = launch(*PAUSING, TWO_RANKS, "launch.max_restarts=1", folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "pausing")
    victim = command.pid_of_rank(tmp_path / "run", 1)
    command.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 1
    assert command.stderr.splitlines()[1].startswith("rank 1 was killed by SIGKILL")
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_by"], result["restarts"]) == ("failed", None, 0)
    assert command.wait_until_gone() == []


# ---- a signal that stops a rank for a while, or for ever

LONGER = (*RUN, "zero.stage=2", "zero.bucket_mb=0.25", "train.max_steps=40", "checkpoint.save_at_end=false", TWO_RANKS)


def completed(command: Command) -> str:
    """The hash of the weights of a run that has trained to its end, and left no process."""
    assert command.wait() == 0, command.stdout + command.stderr
    assert command.wait_until_gone() == []
    return str(result_of(command.folder / "run")["weights_sha256"])


@pytest.fixture
def wanted(launch, once: Callable[[str, Callable[[], Any]], Any], tmp_path: Path) -> str:
    """The hash of the weights of `LONGER` alone."""

    def alone() -> str:
        (tmp_path / "alone").mkdir()
        return completed(launch(*LONGER, folder=tmp_path / "alone"))

    return str(once("stops, alone", alone))


@pytest.mark.case(
    "hosts: Ranks of one host", "under the launcher; or again and again for a moment", under="a rank is stopped"
)
def test_a_rank_that_is_stopped_again_and_again_for_a_moment_costs_no_bit(wanted: str, tmp_path: Path) -> None:
    command = by_hand(*LONGER, folder=tmp_path)
    deadline, num_stops = time.monotonic() + HANG_S, 0
    try:
        victim = command.pid_of_rank(tmp_path / "run", 1)
        while command.process.poll() is None and time.monotonic() < deadline:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(victim, signum)
                time.sleep(0.03)
            num_stops += 1
    except ProcessLookupError:  # it has ended
        pass
    assert completed(command) == wanted
    assert num_stops > 3


@pytest.mark.case("hosts: Ranks of one host", "two runs at once", "do not mix")
def test_two_runs_at_once_do_not_mix(launch, wanted: str, tmp_path: Path) -> None:
    commands = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        commands.append(launch(*LONGER, folder=tmp_path / name))
    assert [completed(command) for command in commands] == [wanted] * 2
