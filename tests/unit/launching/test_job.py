"""What the ranks of a job are told, its folder, and its ending."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zerotrain.config.compose import from_values
from zerotrain.config.schema import Config, LaunchConfig
from zerotrain.errors import ConfigError
from zerotrain.files.lock import LOCK_NAME, is_held
from zerotrain.launching.job import Job, locked, num_threads_per_rank, write_ending
from zerotrain.training.result import RunResult

# One run at a time in a folder, whatever lies in the place of its lock.


def test_a_folder_is_locked_once_and_free_again(tmp_path: Path):
    with locked(tmp_path / "run"):
        said = rf"where a run is under way \(pid {os.getpid()} on .*, started 20"
        with pytest.raises(ConfigError, match=said), locked(tmp_path / "run"):
            raise AssertionError
        assert json.loads((tmp_path / "run" / LOCK_NAME).read_text())["pid"] == os.getpid()
        assert is_held(tmp_path / "run" / LOCK_NAME)
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is a FIFO, and must be a regular file"),
        (Path.mkdir, "it is a folder, and must be a regular file"),
        (lambda path: path.symlink_to("../mine"), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "Too many levels of symbolic links"),
    ],
    ids=["FIFO", "folder", "link", "device"],
)
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], None], said: str):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / LOCK_NAME)
    with pytest.raises(ConfigError) as error, locked(tmp_path / "run"):
        raise AssertionError
    [line] = error.value.problems
    assert line.startswith(f"hydra.run.dir: got {tmp_path}/run, wh")
    assert said in line
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    checked = {"rows": 64, "files": "ab"}
    return Job(config=Config(seed=3), run_dir=tmp_path / "run", overrides=["seed=3"], data_checked=checked)


def test_a_job_arrives_at_other_ranks_as_it_was(job: Job):
    again = replace(job, restarts=2, evaluates={"weights": "checkpoints/step-00000003", "step": 3})
    assert Job.from_json(again.to_json()) == again


def test_the_folder_holds_the_config_and_nothing_of_an_earlier_run(job: Job):
    job.ranks_dir.mkdir(parents=True)
    earlier = [job.ranks_dir / "7.log", job.ranks_dir / "7.error.json", job.run_dir / "result.json"]
    for path in earlier:
        path.write_text("old")
    job.open_folder()
    assert not any(path.exists() for path in earlier)
    assert from_values(OmegaConf.load(job.run_dir / "config.yaml")) == job.config


def test_after_a_restart_the_folder_keeps_what_was_logged_measured_and_saved(job: Job):
    job.open_folder()
    kept = [job.ranks_dir / "0.log", job.run_dir / "metrics.jsonl", job.run_dir / "checkpoints/step-00000010/a"]
    gone = [job.ranks_dir / name for name in ("1.error.json", "0.state", "ending.txt")] + [job.run_dir / "result.json"]
    kept[-1].parent.mkdir(parents=True)
    for path in kept + gone:
        path.write_text("of the first attempt")
    replace(job, config=Config(seed=4), restarts=1).open_folder()
    assert all(path.read_text() == "of the first attempt" for path in kept)
    assert not any(path.exists() for path in gone)
    assert from_values(OmegaConf.load(job.run_dir / "config.yaml")) == job.config


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_a_killed_rank_was_about_to_write_goes_when_the_run_is_started_again(job: Job, restarts: int):
    """They stayed for good: `make chaos` found them (2026-11-22)."""
    job.run_dir.mkdir()
    left = [job.run_dir / name for name in ("result.json.17.tmp", "metrics.jsonl.17.tmp")]
    for path in (*left, job.run_dir / "mine.tmp"):
        path.write_text("half")
    replace(job, restarts=restarts).open_folder()
    assert not any(path.exists() for path in left)
    assert (job.run_dir / "mine.tmp").exists()


def test_another_machine_makes_what_is_missing_of_the_folder_and_takes_nothing(job: Job):
    job.complete_folder()
    assert from_values(OmegaConf.load(job.config_path)) == job.config
    (job.ranks_dir / "0.log").write_text("running")
    job.complete_folder()
    assert (job.ranks_dir / "0.log").read_text() == "running"


def test_an_ending_keeps_what_rank_0_had_written(job: Job):
    job.open_folder()
    RunResult(world_size=2, stage=2, status="stopped", error="SIGTERM", stopped_by="SIGTERM", steps=7).write(
        job.run_dir
    )
    write_ending(job, 2, status="failed", error="rank 1 failed")
    written = json.loads((job.run_dir / "result.json").read_text())
    assert (written["status"], written["error"], written["steps"]) == ("failed", "rank 1 failed", 7)
    assert written["stopped_by"] is None


def test_an_ending_is_written_even_if_rank_0_never_wrote_any(job: Job):
    job.open_folder()
    write_ending(job, 2, status="failed", error="rank 0 was killed by SIGKILL")
    written = json.loads((job.run_dir / "result.json").read_text())
    assert written["overrides"] == ["seed=3"]
    assert written["config_hash"] == job.facts()["config_hash"]
    assert (written["world_size"], written["stage"], written["restarts"]) == (2, 2, 0)


def test_cores_are_shared_out_among_ranks_and_a_number_that_was_set_is_kept():
    assert num_threads_per_rank(Config(), num_local_ranks=1) >= num_threads_per_rank(Config(), num_local_ranks=2)
    assert num_threads_per_rank(Config(), num_local_ranks=10_000) == 1
    assert num_threads_per_rank(Config(launch=LaunchConfig(threads_per_rank=3)), num_local_ranks=2) == 3


@pytest.mark.parametrize(
    "change",
    [{"run_dir": 3}, {"overrides": "x"}, {"config": None}, {"config": {"zero": 3}}, {"restarts": -1}, {"stage": "1"}],
)
def test_a_damaged_job_is_one_line(change: dict, tmp_path: Path) -> None:
    said = Job(config=Config(), run_dir=tmp_path, overrides=[]).to_json()
    assert Job.from_json(said).run_dir == tmp_path
    for text in (json.dumps(json.loads(said) | change), said[:-1], "[" * 9999, b"\xff"):
        with pytest.raises(
            ConfigError, match="the description of the job, as this rank received it, is damaged"
        ) as caught:
            Job.from_json(text)
        assert str(caught.value).isprintable()
