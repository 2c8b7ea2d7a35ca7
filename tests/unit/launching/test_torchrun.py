"""How a rank that torchrun has started ends if its job does not complete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.schema import Config
from zerotrain.errors import CommError
from zerotrain.launching import torchrun
from zerotrain.launching.failures import Failure
from zerotrain.launching.job import Job

RANK_1 = RankEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.fixture
def end_of(tmp_path: Path, monkeypatch):
    """(error) -> what rank 1 did after its part of the job had raised it: sleep, exit with a code."""

    def end(error: BaseException) -> list[str]:
        done: list[str] = []

        def run_rank(job: Job, ranks: RankEnvironment, settle: Callable[[], None]) -> dict[str, Any]:
            if isinstance(error, Exception):
                Failure.of(error, ranks.rank).write(job.ranks_dir)
            raise error

        def exit_now(code: int) -> None:
            done.append(f"exit {code}")
            raise SystemExit(code)

        monkeypatch.setattr(torchrun, "run_rank", run_rank)
        monkeypatch.setattr(torchrun, "exit_now", exit_now)
        monkeypatch.setattr(torchrun.time, "sleep", lambda seconds: done.append("sleep"))
        job = Job(config=Config(), run_dir=tmp_path, overrides=[])
        job.open_folder()
        with pytest.raises(SystemExit):
            torchrun.run_here(job, RANK_1)
        return done

    return end


def result_in(run_dir: Path) -> tuple[str, str]:
    result = json.loads((run_dir / "result.json").read_text())
    return result["status"], result["error"].splitlines()[0]


def test_a_rank_stopped_by_ctrl_c_says_so_and_ends_as_a_shell_expects(end_of, tmp_path: Path):
    assert end_of(KeyboardInterrupt()) == ["sleep", "exit 130"]
    assert result_in(tmp_path) == ("stopped", "stopped by a signal")


def test_a_rank_that_failed_ends_at_once(end_of, tmp_path: Path):
    assert end_of(ValueError("mine")) == ["exit 1"]
    assert result_in(tmp_path) == ("failed", "rank 1 failed: ValueError: mine")


def test_a_rank_that_lost_another_lets_that_one_end_first(end_of, tmp_path: Path):
    """Torchrun takes the first process to end for the root cause."""
    assert end_of(CommError("rank 0 is gone")) == ["sleep", "exit 1"]
    assert result_in(tmp_path) == ("failed", "rank 1 lost another rank: rank 0 is gone")
