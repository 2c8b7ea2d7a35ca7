"""The table of jobs in a terminal, built from their folders."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from zerotrain.report.files import print_table
from zerotrain.report.rows import read_report
from zerotrain.training.result import RunResult


def write(folder: Path, job: int, **fields) -> None:
    path = folder / str(job)
    path.mkdir()
    overrides = ["launch.nproc_per_node=2", f"zero.stage={job}"]
    result = {
        "status": "completed",
        "final_val_loss": 2.5,
        "final_train_loss": 2.4,
        "weights_sha256": "a" * 64,
        "overrides": overrides,
        **fields,
    }
    RunResult(**{"world_size": 2} | result).write(path)


def table_of(folder: Path) -> str:
    stream = io.StringIO()
    print_table(read_report(folder), Console(file=stream, width=80))
    return stream.getvalue()


def test_a_row_tells_a_job_by_the_overrides_that_differ(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1)
    table = table_of(tmp_path)
    assert "zero.stage=0" in table
    assert "zero.stage=1" in table
    assert table.count("launch.nproc_per_node=2") == 0
    assert table.count("a" * 12 + " ") == 2


def test_numbers_of_ranks_that_differ_are_a_column(tmp_path: Path):
    for job, ranks in enumerate((1, 2, 0)):
        overrides = [f"launch.nproc_per_node={ranks}", "zero.stage=3", f"seed={job}"]
        write(tmp_path, job, world_size=ranks, overrides=overrides)
    rows = [line.split() for line in table_of(tmp_path).splitlines()]
    assert rows[0][:4] == ["job", "overrides", "ranks", "status"]
    assert [row[:3] for row in rows[2:5]] == [["0", "seed=0", "1"], ["1", "seed=1", "2"], ["2", "seed=2", "-"]]


def test_equal_weights_are_said_to_be_equal_in_full(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1)
    assert f"weights: 2 of 2 jobs have the same sha256 {'a' * 64}" in table_of(tmp_path)


def test_different_weights_are_counted(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1)
    write(tmp_path, 2, weights_sha256="b" * 64)
    assert f"weights: 2 different sha256 in 3 jobs: {'a' * 12} x 2, {'b' * 12} x 1" in table_of(tmp_path)


def test_a_failed_job_is_in_the_table_with_its_cause(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1, status="failed", error="zero.stage: got 5", weights_sha256=None, final_val_loss=None)
    table = table_of(tmp_path)
    assert "job 1 failed: zero.stage: got 5" in table
    assert "weights: 1 of 2 jobs have the same sha256" in table


def test_each_job_has_its_row_whatever_became_of_it(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1, status="failed", error="the disk is full", weights_sha256=None, final_val_loss=None)
    write(tmp_path, 2, status="stopped", error="stopped by a signal", weights_sha256=None)
    _names, _rule, *lines = table_of(tmp_path).splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["0", "zero.stage=0", "completed"],
        ["1", "zero.stage=1", "failed"],
        ["2", "zero.stage=2", "stopped"],
    ]


def test_a_job_that_never_started_is_no_other_number_of_ranks(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1, world_size=0, status="failed", error="zero.stage: got 5")
    assert table_of(tmp_path).split()[:3] == ["job", "overrides", "status"]


def test_what_a_file_says_is_shown_as_it_is(tmp_path: Path):
    write(tmp_path, 0, overrides=["model.name=[/b]"], error="[/red] \x1b[2J", status="failed")
    write(tmp_path, 1, overrides=["m=[bold]\u202e"])
    table = table_of(tmp_path)
    assert "model.name=[/b]" in table
    assert "m=[bold]\\u202e" in table
    assert "job 0 failed: [/red] \\x1b[2J" in table


@pytest.mark.parametrize("content", ["", "[" * 5000, '{"status": "completed"}', "\xff"])
def test_a_result_that_cannot_be_read_is_a_row_and_no_traceback(tmp_path: Path, content: str):
    write(tmp_path, 0)
    (tmp_path / "1").mkdir()
    (tmp_path / "1/result.json").write_text(content, encoding="latin-1")
    table = table_of(tmp_path)
    assert "job 1 failed: its result.json cannot be read: " in table
    assert "weights: 1 of 2 jobs" in table


def test_the_override_that_lets_a_sweep_go_on_tells_no_job_from_another(tmp_path: Path):
    write(tmp_path, 0, overrides=["seed=0"])
    write(tmp_path, 1, overrides=["seed=1", "checkpoint.resume=auto"])
    assert "checkpoint.resume" not in table_of(tmp_path)
