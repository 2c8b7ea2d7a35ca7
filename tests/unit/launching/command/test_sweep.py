"""A sweep as its driver sees it: which results are its own, which folders are taken, and its exit code."""

from pathlib import Path

import pytest

from zerotrain.errors import ConfigError
from zerotrain.launching.command import sweep
from zerotrain.launching.end import exits
from zerotrain.launching.job.folder_lock import locked, note_kept
from zerotrain.training.figures.result import RunResult


def write(folder: Path, job: int, **fields) -> None:
    path = folder / str(job)
    path.mkdir()
    overrides = ["launch.nproc_per_node=2", f"zero.stage={job}"]
    result = {
        "status": "completed",
        "final_val_loss": 2.5,
        "weights_sha256": "a" * 64,
        "overrides": overrides,
        **fields,
    }
    RunResult(**{"world_size": 2} | result).write(path)


def test_jobs_come_in_the_order_of_their_numbers(tmp_path: Path):
    for job in (10, 2, 0, 1):
        write(tmp_path, job)
    assert list(sweep.read_results(tmp_path)) == ["0", "1", "2", "10"]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("completed", exits.COMPLETED, exits.COMPLETED),
        ("failed", exits.COMPLETED, exits.FAILED),
        ("failed", exits.FAILED, exits.FAILED),
        ("stopped", 130, 130),
    ],
)
def test_the_exit_code_is_that_of_a_failure_if_any_job_failed(
    tmp_path: Path, monkeypatch, capsys, status, code, expected
):
    write(tmp_path, 0, status=status)
    monkeypatch.setattr(sweep, "_folders", [tmp_path])
    assert sweep.report(code) == expected
    assert status in capsys.readouterr().out


def test_a_process_that_drove_no_sweep_prints_no_table(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "_folders", [])
    assert sweep.report(exits.FAILED) == exits.FAILED
    assert capsys.readouterr().out == ""


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a sweep of two jobs that is started again."""
    for job in (0, 1):
        write(tmp_path, job)
        with locked(tmp_path / str(job)):
            note_kept(tmp_path / str(job))  # by a sweep before
    monkeypatch.setattr(sweep, "_earlier", set())
    monkeypatch.setattr(sweep, "_folders", [])
    sweep.SweepFolder()._note(tmp_path)
    return tmp_path


def test_of_an_earlier_sweep_no_result_is_shown_but_those_that_this_one_has_left(earlier: Path):
    assert sweep.read_results(earlier) == {}
    with locked(earlier / "1"):
        pass  # and refused
    assert sweep.read_results(earlier) == {}
    with locked(earlier / "0"):
        note_kept(earlier / "0")
    write(earlier, 2)
    assert list(sweep.read_results(earlier)) == ["0", "2"]


def test_a_folder_that_two_jobs_would_share_is_refused_to_the_second(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sweep, "_jobs", {})
    sweep.claim(tmp_path / "a", 0)
    sweep.claim(tmp_path / "b", 1)
    sweep.claim(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match=r"got a, which job 0 uses too"):
        sweep.claim(tmp_path / "a", 2)
