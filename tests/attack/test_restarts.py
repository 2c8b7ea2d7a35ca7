"""Ranks that die or fail are started again, where the config says so, and given up in time."""

from pathlib import Path

import pytest
from commands import MISBEHAVING, ON_TWO_RANKS, TWO_RANKS, result_of


@pytest.mark.case("stopping", "a rank is killed, with `launch.max_restarts`", "all start again, and the run completes")
def test_a_killed_rank_is_started_again_and_the_run_completes(launch, tmp_path: Path):
    command = launch(*MISBEHAVING, "+model.action=kill once", "launch.max_restarts=3", TWO_RANKS, folder=tmp_path)
    assert command.wait() == 0, command.stderr
    assert command.stderr.splitlines() == [
        "rank 1 was killed by SIGKILL (kill -9, or the machine ran out of memory); restart 1 of 3 from the start",
        f"  its log: {tmp_path / 'run/ranks/1.log'}",
    ]
    result = result_of(tmp_path / "run")
    assert (result["status"], result["restarts"], result["steps"]) == ("completed", 1, 3)
    assert (tmp_path / "run/ranks/0.log").read_text().count("step 1/3") == 2
    assert {path.name for path in (tmp_path / "run/ranks").iterdir()} == {"0.log", "1.log"}
    assert command.wait_until_gone() == []


@pytest.mark.case(
    "stopping",
    "ranks fail again and again",
    "the run ends after two restarts without a newer checkpoint, with the first cause",
)
def test_ranks_that_fail_again_and_again_are_given_up(launch, tmp_path: Path):
    command = launch(*MISBEHAVING, "+model.action=raise", "+model.rank=0", "launch.max_restarts=9", folder=tmp_path)
    assert command.wait() == 1
    cause, log = "rank 0 failed: ValueError: the third batch is unlucky", f"  its log: {tmp_path / 'run/ranks/0.log'}"
    given_up = "  gave up: the last 2 restarts wrote no newer checkpoint"
    assert command.stderr.splitlines() == [
        f"{cause}; restart 1 of 9 from the start",
        log,
        f"{cause}; restart 2 of 9 from the start",
        log,
        cause,
        log,
        given_up,
    ]
    result = result_of(tmp_path / "run")
    assert (result["status"], result["restarts"]) == ("failed", 2)
    assert result["error"] == f"{cause}\n{log}\n{given_up}"
    assert (tmp_path / "run/ranks/0.log").read_text().count("Traceback") == 3


@pytest.mark.case("stopping", "`torchrun --max-restarts`", "all start again in the same folder")
def test_torchrun_starts_all_ranks_again_in_the_same_folder(torchrun, tmp_path: Path):
    """Whose name has the time in it."""
    settings = (*(each for each in MISBEHAVING if each != "hydra.run.dir=run"), "+model.action=kill once")
    command = torchrun(*settings, folder=tmp_path, options=(*ON_TWO_RANKS, "--max-restarts=2"))
    assert command.wait() == 0, command.stderr
    [run_dir] = (tmp_path / "outputs").glob("*/*")
    result = result_of(run_dir)
    assert (result["status"], result["restarts"], result["steps"]) == ("completed", 1, 3)
    assert (run_dir / "ranks/0.log").read_text().count("step 1/3") == 2
    assert {path.name for path in (run_dir / "ranks").iterdir()} == {"0.log", "1.log"}
    assert "restart 1 from the start" in command.stderr.splitlines()
    assert command.wait_until_gone() == []
