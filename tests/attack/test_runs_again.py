"""A completed run is never trained anew: what would go on with it leaves it as it is, and unfinished ones go on."""

import os
import shutil
from pathlib import Path

import pytest
from commands import TINY, result_of

from tests.zygote.client import Ending, Zygote

AUTO = "checkpoint.resume=auto"
NOTES = (".lock", "multirun.yaml", "sweep.jsonl", "report.html", "sweep.csv", "sweep.json")
TAKEN = "is taken as it lies in"
LEFT = "holds this run already, and it is completed; nothing is changed"


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files but the lock, and the notes of sweeps; what they hold and when they were written."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in NOTES)
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def rows_of(ending: Ending) -> list[list[str]]:
    """(job, override, status) of the table of a sweep."""
    return [line.split()[:3] for line in ending.out.splitlines() if line.strip()[:1].isdigit() and "seed=" in line]


@pytest.fixture(scope="module")
def swept(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a sweep of two jobs lies, in `sweep`; a third was cut off before it had a result."""
    folder = tmp_path_factory.mktemp("swept")
    ending = zygote.run(["-m", *TINY, "seed=0,1", "hydra.sweep.dir=sweep"], folder, {})
    assert ending.code == 0, ending.err
    shutil.copytree(folder / "sweep/1", folder / "sweep/2")
    (folder / "sweep/2/result.json").unlink()
    config = folder / "sweep/2/config.yaml"
    config.write_text(config.read_text().replace("seed: 1", "seed: 2"))
    return folder


def sweep(zygote: Zygote, folder: Path, *more: str, seeds: str = "0,1,2") -> Ending:
    return zygote.run(["-m", *TINY, f"seed={seeds}", "hydra.sweep.dir=sweep", *more], folder, {})


def test_a_sweep_again_leaves_completed_jobs_and_goes_on_with_the_others(zygote, swept: Path, tmp_path: Path):
    shutil.copytree(swept / "sweep", tmp_path / "sweep")
    before = [state_of(tmp_path / "sweep" / str(job)) for job in range(2)]
    for num_taken, more in ((2, ()), (3, (AUTO,))):
        ending = sweep(zygote, tmp_path, *more)
        assert (ending.code, ending.err) == (0, "")
        assert ending.out.count(TAKEN) == num_taken
        assert [state_of(tmp_path / "sweep" / str(job)) for job in range(2)] == before
        assert result_of(tmp_path / "sweep/2")["status"] == "completed"
        assert rows_of(ending) == [[str(job), f"seed={job}", "completed"] for job in range(3)]
        assert "in 3 jobs" in ending.out


def test_completed_jobs_are_taken_by_their_settings_and_not_by_their_numbers(zygote, swept: Path, tmp_path: Path):
    shutil.copytree(swept / "sweep", tmp_path / "sweep")
    before = state_of(tmp_path / "sweep")
    ending = sweep(zygote, tmp_path, seeds="1,0")
    assert (ending.code, ending.err) == (0, "")
    assert [line.split(":")[0] for line in ending.out.splitlines()[:2]] == [
        f"job {job} is taken as it lies in {1 - job}" for job in range(2)
    ]
    assert state_of(tmp_path / "sweep") == before


@pytest.mark.parametrize("damage", ["damaged", "FIFO", "folder"])
def test_a_result_that_cannot_be_read_is_not_replaced_and_the_other_jobs_are_done(
    zygote, swept: Path, tmp_path: Path, damage: str
):
    make = {"damaged": lambda path: path.write_text('{"status": '), "FIFO": os.mkfifo, "folder": Path.mkdir}
    shutil.copytree(swept / "sweep", tmp_path / "sweep")
    result = tmp_path / "sweep/1/result.json"
    result.unlink()
    make[damage](result)
    before = state_of(tmp_path / "sweep")
    ending = sweep(zygote, tmp_path, AUTO, seeds="0,1")
    assert ending.code == 1
    assert ending.err.splitlines()[0].startswith(f"job 1: hydra.run.dir: got {tmp_path}/sweep/1, wh")
    assert "Traceback" not in ending.err
    assert "of the only job with a result" in ending.out
    assert state_of(tmp_path / "sweep") == before


@pytest.fixture(scope="module")
def completed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a completed run lies, in `run`, with its last checkpoint."""
    folder = tmp_path_factory.mktemp("completed")
    ending = zygote.run([*TINY, "hydra.run.dir=run"], folder, {})
    assert ending.code == 0, ending.err
    return folder


@pytest.mark.parametrize("checkpoints", ["with", "without"])
def test_a_completed_run_is_left_as_it_is_also_where_its_checkpoints_are_gone(
    zygote, completed: Path, tmp_path: Path, checkpoints: str
):
    shutil.copytree(completed / "run", tmp_path / "run")
    if checkpoints == "without":
        shutil.rmtree(tmp_path / "run/checkpoints")
    before = state_of(tmp_path / "run")
    for more in ((), ("launch.nproc_per_node=2",), ("checkpoint.keep=7",)):
        ending = zygote.run([*TINY, "hydra.run.dir=run", AUTO, *more], tmp_path, {})
        assert (ending.code, ending.err) == (0, "")
        assert ending.out.splitlines()[0] == f"run {LEFT}"
        assert ("to go on: " in ending.out) == (checkpoints == "with")
    ending = zygote.run([*TINY, "hydra.run.dir=run", AUTO, "optimizer.lr=0.1"], tmp_path, {})
    assert ending.code == 2
    assert "a completed run with other settings (optimizer.lr: " in ending.err
    assert state_of(tmp_path / "run") == before


def test_a_completed_run_is_trained_longer_by_what_its_refusal_says(zygote, completed: Path, tmp_path: Path):
    shutil.copytree(completed / "run", tmp_path / "run")
    refused = zygote.run([*TINY, "hydra.run.dir=run"], tmp_path, {})
    assert "checkpoint.resume=auto with train.max_steps above 3 to train that run longer" in refused.err
    ending = zygote.run([*TINY, "hydra.run.dir=run", AUTO, "train.max_steps=4"], tmp_path, {})
    assert ending.code == 0, ending.err
    assert result_of(tmp_path / "run")["steps"] == 4


def test_under_torchrun_a_completed_run_is_left_by_all_ranks(torchrun, completed: Path, tmp_path: Path):
    shutil.copytree(completed / "run", tmp_path / "run")
    before = state_of(tmp_path / "run")
    alone, swept = ("hydra.run.dir=run", AUTO), ("-m", "hydra.sweep.dir=.", "hydra.sweep.subdir=run")
    for settings, said in ((alone, f"run {LEFT}"), (swept, f"job 0 {TAKEN} run: completed with loss ")):
        command = torchrun(*TINY, *settings, folder=tmp_path)
        assert command.wait() == 0, command.stderr
        assert command.stdout.startswith(said)
        assert state_of(tmp_path / "run") == before


def test_a_run_of_text_is_known_again(completed: Path, tmp_path: Path, zygote):
    """Its vocabulary, and with it a setting, comes of the data."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    small = [each for each in TINY if not each.startswith("data")]
    given = [*small, "data=text", "data.path=text.txt", "data.seq_len=16", "hydra.run.dir=run", "zero.schedule={2:3}"]
    assert zygote.run(given, tmp_path, {}).code == 0
    before = state_of(tmp_path / "run")
    ending = zygote.run([*given, AUTO], tmp_path, {})
    assert (ending.code, ending.err) == (0, "")
    assert LEFT in ending.out
    assert state_of(tmp_path / "run") == before


def test_a_file_named_checkpoints_is_found_before_any_rank_starts(zygote, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("mine")
    for more in ((), (AUTO,), ("launch.overwrite=true",)):
        ending = zygote.run([*TINY, "hydra.run.dir=run", *more], tmp_path, {})
        assert ending.code == 2
        [line] = ending.err.splitlines()
        assert line == (
            f"hydra.run.dir: got {tmp_path}/run, where checkpoints is a file, and must be a folder; move that away, or "
            "give another hydra.run.dir"
        )
        assert not (tmp_path / "run/ranks").exists()
    assert (tmp_path / "run/checkpoints").read_text() == "mine"
