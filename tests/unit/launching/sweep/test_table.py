"""The table at the end of a sweep, built from the result files."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from zerotrain.launching.end import exits
from zerotrain.launching.job.folder_lock import locked
from zerotrain.launching.sweep import driver, table
from zerotrain.launching.sweep.journal import JobEvent, SweepJournal
from zerotrain.launching.sweep.study import Study
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.table import print_table, read_results
from zerotrain.launching.sweep.telling import Teller
from zerotrain.training.figures.result import RunResult


def write(folder: Path, job: int, event: str = "ended", said: str | None = None, **fields) -> None:
    """A job that has ended: its line in the journal, and its result."""
    path = folder / str(job)
    path.mkdir()
    status = None if event == "begun" else said or fields.get("status", "completed")
    SweepJournal(folder).append(JobEvent(event=event, job=job, folder=str(job), hash="a", overrides=[], status=status))
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


def sweep_in(folder: Path, **fields) -> Sweep:
    return Sweep(folder=folder, start=0, **fields)


def table_of(folder: Path) -> str:
    stream = io.StringIO()
    print_table(read_results(sweep_in(folder)), Console(file=stream, width=80))
    return stream.getvalue()


def test_jobs_come_in_the_order_of_their_numbers(tmp_path: Path):
    for job in (10, 2, 0, 1):
        write(tmp_path, job)
    assert list(read_results(sweep_in(tmp_path))) == ["0", "1", "2", "10"]


def test_a_row_tells_a_job_by_the_overrides_that_differ(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1)
    shown = table_of(tmp_path)
    assert "zero.stage=0" in shown
    assert "zero.stage=1" in shown
    assert shown.count("launch.nproc_per_node=2") == 0
    assert shown.count("a" * 12 + " ") == 2


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
    shown = table_of(tmp_path)
    assert "job 1 failed: zero.stage: got 5" in shown
    assert "weights: 1 of 2 jobs have the same sha256" in shown


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


@pytest.mark.parametrize(
    ("fields", "diverged", "code", "expected"),
    [
        ({"status": "completed"}, "fail", exits.COMPLETED, exits.COMPLETED),
        ({"status": "failed"}, "report", exits.COMPLETED, exits.FAILED),
        ({"status": "failed"}, "report", exits.FAILED, exits.FAILED),
        ({"status": "stopped"}, "report", 130, 130),
        ({"status": "completed", "final_train_loss": None}, "report", exits.COMPLETED, exits.COMPLETED),
        ({"status": "completed", "final_train_loss": None}, "fail", exits.COMPLETED, exits.FAILED),
    ],
)
def test_the_exit_code_is_that_of_a_failure_if_any_job_failed(
    tmp_path: Path, monkeypatch, capsys, fields, diverged, code, expected
):
    write(tmp_path, 0, **fields)
    sweep = sweep_in(tmp_path, diverged=diverged)
    monkeypatch.setattr(driver, "_driven", [(sweep, Teller(sweep))])
    assert table.report(code) == expected
    assert ("diverged" if "final_train_loss" in fields else fields["status"]) in capsys.readouterr().out


def test_a_process_that_drove_no_sweep_prints_no_table(monkeypatch, capsys):
    monkeypatch.setattr(driver, "_driven", [])
    assert table.report(exits.FAILED) == exits.FAILED
    assert capsys.readouterr().out == ""


def test_of_an_earlier_sweep_no_job_is_shown_but_those_that_this_one_has_met(tmp_path: Path):
    for job in (0, 1):
        write(tmp_path, job)
    sweep = Sweep(folder=tmp_path, start=SweepJournal(tmp_path).nbytes)
    assert read_results(sweep) == {}
    sweep.journal.append(JobEvent(event="taken", job=7, folder="1", hash="b", overrides=[], status="completed"))
    write(tmp_path, 2)
    assert list(read_results(sweep)) == ["2", "7 in 1"]


def test_what_a_result_says_counts_more_than_the_journal(tmp_path: Path):
    write(tmp_path, 0, event="begun")
    write(tmp_path, 1, status="failed", error="the third batch is unlucky", said="completed")
    write(tmp_path, 2, status="completed", final_train_loss=None, final_val_loss=None, said="completed")
    write(
        tmp_path, 3, status="failed", error="rank 0 failed: TrainingError: the gradient was not finite", said="failed"
    )
    results = read_results(sweep_in(tmp_path))
    assert [each["status"] for each in results.values()] == ["completed", "failed", "diverged", "diverged"]


def test_a_job_without_a_result_runs_or_its_process_is_gone(tmp_path: Path):
    for job in (0, 1):
        (tmp_path / str(job)).mkdir()
        event = JobEvent(event="begun", job=job, folder=str(job), hash="a", overrides=[f"seed={job}"])
        SweepJournal(tmp_path).append(event)
    with locked(tmp_path / "0"):
        results = read_results(sweep_in(tmp_path))
    assert [each["status"] for each in results.values()] == ["running", "failed"]
    assert "its process is gone" in results["1"]["error"]


def test_a_refusal_is_not_hidden_by_the_result_of_the_job_that_has_the_folder(tmp_path: Path):
    write(tmp_path, 0)
    refused = JobEvent(
        event="refused", job=1, folder="0", hash="b", overrides=[], status="failed", error="which job 0 uses"
    )
    SweepJournal(tmp_path).append(refused)
    results = read_results(sweep_in(tmp_path))
    assert [each["status"] for each in results.values()] == ["completed", "failed"]


def test_no_other_folder_is_looked_into(tmp_path: Path):
    (tmp_path / "sweep").mkdir()
    write(tmp_path, 0)
    outside = JobEvent(event="taken", job=1, folder="../0", hash="b", overrides=[], status="completed")
    SweepJournal(tmp_path / "sweep").append(outside)
    [result] = read_results(sweep_in(tmp_path / "sweep")).values()
    assert result["weights_sha256"] is None


def test_a_job_that_never_started_is_no_other_number_of_ranks(tmp_path: Path):
    write(tmp_path, 0)
    write(tmp_path, 1, world_size=0, status="failed", error="zero.stage: got 5")
    assert table_of(tmp_path).split()[:3] == ["job", "overrides", "status"]


def test_what_a_file_says_is_shown_as_it_is(tmp_path: Path):
    write(tmp_path, 0, overrides=["model.name=[/b]"], error="[/red] \x1b[2J", status="failed")
    write(tmp_path, 1, overrides=["m=[bold]\u202e"])
    shown = table_of(tmp_path)
    assert "model.name=[/b]" in shown
    assert "m=[bold]\\u202e" in shown
    assert "job 0 failed: [/red] \\x1b[2J" in shown


@pytest.mark.parametrize("content", ["", "[" * 5000, '{"status": "completed"}', "\xff"])
def test_a_result_that_cannot_be_read_is_a_row_and_no_traceback(tmp_path: Path, content: str):
    write(tmp_path, 0)
    write(tmp_path, 1)
    (tmp_path / "1/result.json").write_text(content, encoding="latin-1")
    shown = table_of(tmp_path)
    assert "job 1 failed: its result.json cannot be read: " in shown
    assert "weights: 1 of 2 jobs" in shown


def test_the_override_that_lets_a_sweep_go_on_tells_no_job_from_another(tmp_path: Path):
    write(tmp_path, 0, overrides=["seed=0"])
    write(tmp_path, 1, overrides=["seed=1", "checkpoint.resume=auto"])
    assert "checkpoint.resume" not in table_of(tmp_path)


def test_the_best_job_is_told_by_the_objective_and_pruned_ones_are_counted(tmp_path: Path, capfd):
    sweep = sweep_in(tmp_path, total=4, objectives=("val_accuracy",), directions=("maximize",))
    teller = Teller(sweep)
    values = [("completed", 0.5), ("completed", 0.75), ("pruned", 0.9), ("completed", 0.6)]
    for job, (status, value) in enumerate(values):
        given = {
            "job": job,
            "folder": str(job),
            "hash": None,
            "overrides": [],
            "error": "x" if status == "pruned" else None,
        }
        sweep.journal.append(JobEvent(event="ended", status=status, value=value, final_val_loss=9.0 - job, **given))
    teller.look()
    told = capfd.readouterr()
    assert told.out.splitlines() == [
        "job 0 completed with val_accuracy 0.5000 (1/4, best 0.5000 job 0, 0 s left)",
        "job 1 completed with val_accuracy 0.7500 (2/4, best 0.7500 job 1, 0 s left)",
        "job 2 pruned with val_accuracy 0.9000 (3/4, 1 pruned, best 0.7500 job 1, 0 s left)",
        "job 3 completed with val_accuracy 0.6000 (4/4, 1 pruned, best 0.7500 job 1)",
    ]
    assert told.err == ""


def test_of_a_study_all_trials_are_counted_also_those_of_drivers_before(tmp_path: Path, capfd):
    write(tmp_path, 0)
    write(tmp_path, 1, status="failed", error="the disk is full")
    study = Study(url="sqlite:///study.db", name="sweep", num_trials=3)
    sweep = Sweep(folder=tmp_path, start=SweepJournal(tmp_path).nbytes, total=3, study=study)
    assert list(read_results(sweep)) == ["0", "1"]
    teller = Teller(sweep)
    write(tmp_path, 2, final_val_loss=2.0)
    teller.look()
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("job 2 completed (3/3, 1 failed")
    assert list(read_results(sweep)) == ["0", "1", "2"]


def test_a_study_that_has_all_its_trials_has_nothing_to_go_on_with(tmp_path: Path, monkeypatch, capsys):
    write(tmp_path, 0)
    write(tmp_path, 1, status="failed", error="the disk is full")
    for total, goes_on in ((2, False), (3, True)):
        study = Study(url="sqlite:///study.db", name="sweep", num_trials=total)
        sweep = sweep_in(tmp_path, total=total, study=study)
        monkeypatch.setattr(driver, "_driven", [(sweep, Teller(sweep))])
        assert table.report(exits.COMPLETED) == exits.FAILED
        assert ("to go on: " in capsys.readouterr().out) == goes_on
