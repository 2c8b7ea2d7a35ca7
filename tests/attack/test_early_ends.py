"""A process that ends before its work is done is a failure, whatever its exit code, and is named with what it did."""

import time
from pathlib import Path

import pytest
from commands import MISBEHAVING, TINY, TWO_RANKS, result_of

RUN = (*TINY, "hydra.run.dir=run")


@pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
def test_a_class_that_ends_the_process_is_refused_by_name(launch, tmp_path: Path, ending: str):
    command = launch(*RUN, "model._target_=misbehaving.EndingMLP", f"+model.ending={ending}", folder=tmp_path)
    assert command.wait() == 2
    assert command.stderr.splitlines() == [
        "model._target_: got misbehaving.EndingMLP, which ended the process with exit code 0 during a test call; "
        "it must return or raise an exception"
    ]
    assert result_of(tmp_path / "run")["status"] == "failed"


ENDS = {
    "exit of C": "ended with exit code 0 in training misbehaving.MisbehavingMLP, before its work was done",
    "os._exit": "failed: SystemExit: the process tried to exit with code 0 before its work was done",
    "sys.exit": "failed: SystemExit: the process tried to exit with code 0 before its work was done",
}


@pytest.mark.parametrize(("action", "rank"), [*((action, 1) for action in ENDS), ("exit of C", 0)])
def test_a_rank_that_ends_before_its_work_is_done_is_named_with_what_it_did(
    launch, tmp_path: Path, action: str, rank: int
):
    settings = (f"+model.action={action}", f"+model.rank={rank}", TWO_RANKS)
    command = launch(*MISBEHAVING, *settings, folder=tmp_path)
    command.require_failed(told := f"rank {rank} {ENDS[action]}\n  its log: {tmp_path / f'run/ranks/{rank}.log'}")
    assert command.stderr == f"{told}\n"


def test_one_rank_alone_that_ends_with_exit_code_0_has_not_completed(launch, tmp_path: Path):
    command = launch(*MISBEHAVING, "+model.action=exit of C", "+model.rank=0", folder=tmp_path)
    command.require_failed(f"rank 0 {ENDS['exit of C']}")


@pytest.mark.parametrize("action", ["exit of C", "sys.exit"])
def test_under_torchrun_too(torchrun, tmp_path: Path, action: str):
    command = torchrun(*MISBEHAVING, f"+model.action={action}", folder=tmp_path)
    assert command.wait() == 1
    what = ENDS[action].replace("ended with exit code 0", "was killed or exited without an error message")
    result = result_of(tmp_path / "run")
    assert (result["status"], result["error"].splitlines()[0]) == ("failed", f"rank 1 {what}")
    assert f"rank 1 {what}" in command.stderr
    assert command.wait_until_gone() == []


@pytest.mark.case(
    "hosts: Ranks of one host",
    "under the launcher; or again and again for a moment",
    "reported by name within `launch.timeout_s`; the same bits",
    under="a rank is stopped",
)
@pytest.mark.parametrize("start", ["launch", "torchrun"])
def test_a_rank_that_was_stopped_is_said_not_to_answer_and_is_ended_soon(request, tmp_path: Path, start: str):
    ranks = (TWO_RANKS,) if start == "launch" else ()
    settings = (*MISBEHAVING[:-1], "+model.action=stop", "launch.timeout_s=6", *ranks)
    command = request.getfixturevalue(start)(*settings, folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/0.log", "step 1/3")
    started_s = time.monotonic()
    assert command.wait() == 1
    assert time.monotonic() - started_s < 20.0  # without that the launcher waits for 30 s
    cause = "rank 1 did not answer for 6 s, last seen in training misbehaving.MisbehavingMLP, step 2; rank 0 waited in "
    told = [line for line in command.stderr.splitlines() if line.startswith("rank ")]
    assert len(told) == 1
    assert told[0].startswith(cause)
    assert result_of(tmp_path / "run")["error"].startswith(cause)
    assert command.wait_until_gone() == []
