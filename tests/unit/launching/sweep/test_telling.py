"""What the user of a running sweep sees: lines, one line of progress in a terminal, and a report that is kept."""

import os
import pty
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.report.folders import write_job, write_result
from zerotrain.config.schema import SweepConfig
from zerotrain.launching import exits
from zerotrain.launching.job import locked
from zerotrain.launching.sweep import telling
from zerotrain.launching.sweep.study import Study
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.telling import StatusLine, Teller
from zerotrain.report.journal import JobEvent, SweepJournal
from zerotrain.report.rows import Row, read_report


def say(folder: Path, event: str, number: int, **fields) -> JobEvent:
    overrides = [f"seed={number}"]
    said = JobEvent(event=event, job=number, folder=str(number), hash="a", overrides=overrides, **fields)
    SweepJournal(folder).append(said)
    return said


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal's two ends, ours and that of programs, 80 columns wide."""
    ours, theirs = pty.openpty()
    try:
        os.set_blocking(ours, False)
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def seen(ours: int) -> str:
    """All that was written to the terminal by now."""
    found = b""
    while select.select([ours], [], [], 0)[0]:
        found += os.read(ours, 65536)
    return found.decode()


def test_a_file_of_the_user_s_own_is_no_reason_to_end_and_stays(tmp_path: Path):
    (tmp_path / "sweep.csv").write_text("mine")
    teller = Teller(Sweep(folder=tmp_path, start=0))
    say(tmp_path, "refused", 0, status="failed", error="zero.stage: got 9")
    teller.keep_report()
    teller.close()
    assert (tmp_path / "sweep.csv").read_text() == "mine"


def test_a_job_that_ran_in_an_earlier_sweep_of_the_folder_begins_again(tmp_path: Path, capfd: pytest.CaptureFixture):
    say(tmp_path, "begun", 0)
    sweep = Sweep(folder=tmp_path, start=SweepJournal(tmp_path).nbytes)
    say(tmp_path, "begun", 0)
    say(tmp_path, "begun", 1)
    Teller(sweep).close()
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["job 0 begins again in 0", "job 1 begins in 1"]


def test_a_terminal_shows_the_running_jobs_in_one_line(tmp_path: Path):
    write_job(tmp_path / "3", losses=[5.0, None, 2.31], status="stopped")
    (tmp_path / "3/config.yaml").write_text("train:\n  max_steps: 400\n")
    (tmp_path / "3/metrics.jsonl").open("a").write('{"step": 30, "val_loss": 1}\n{"step": 40, "train_l')
    write_job(tmp_path / "4", losses=[None])
    (tmp_path / "4/config.yaml").write_text("[" * 1000)
    last = [say(tmp_path, "begun", number) for number in (3, 4, 5)]
    last += [
        say(tmp_path, "ended", 6, status="completed"),
        JobEvent(event="begun", job=7, folder="../3", hash=None, overrides=[]),
    ]
    with terminal() as (ours, theirs):
        line = StatusLine(os.fdopen(os.dup(theirs), "w"), tmp_path)
        line.draw(last)
        line.draw(last)
        assert seen(ours) == "\r\x1b[Kjob 3 step 20/400 loss 2.310, job 4 step 0 loss nan, job 5 starts"
        line.erase()
        line.erase()
        assert seen(ours) == "\r\x1b[K"
        line.draw([say(tmp_path, "begun", number) for number in range(10, 30)])
        assert len(seen(ours)) <= len("\r\x1b[K") + 79


def test_a_pipe_and_a_dumb_terminal_get_lines_alone(tmp_path: Path, monkeypatch):
    last = [say(tmp_path, "begun", 0)]
    with (tmp_path / "out").open("w") as out:
        StatusLine(out, tmp_path).draw(last)
    assert (tmp_path / "out").read_text() == ""
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as (ours, theirs):
        StatusLine(os.fdopen(os.dup(theirs), "w"), tmp_path).draw(last)
        assert seen(ours) == ""


# The end of a sweep: the rows of its jobs out of its whole report, and its exit code.


def write(folder: Path, job: int, event: str = "ended", said: str | None = None, **fields) -> None:
    """A job that has ended: its line in the journal, and its result."""
    status = None if event == "begun" else said or fields.get("status", "completed")
    SweepJournal(folder).append(JobEvent(event=event, job=job, folder=str(job), hash="a", overrides=[], status=status))
    write_result(folder, job, **fields)


def sweep_in(folder: Path, **fields) -> Sweep:
    return Sweep(folder=folder, start=0, **fields)


def rows_of(sweep: Sweep) -> list[Row]:
    return read_report(sweep.folder).only(sweep.folder, sweep.events_to_count()).rows


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
    sweep = sweep_in(tmp_path, settings=SweepConfig(diverged=diverged))
    monkeypatch.setattr(telling, "_driven", [(sweep, Teller(sweep))])
    assert telling.report(code) == expected
    assert ("diverged" if "final_train_loss" in fields else fields["status"]) in capsys.readouterr().out


@pytest.mark.parametrize(("by", "goes_on"), [("callbacks.early_stopping", False), ("SIGTERM", True)])
def test_a_job_that_a_callback_has_ended_is_done(tmp_path: Path, monkeypatch, capsys, by: str, goes_on: bool):
    write(tmp_path, 0)
    write(tmp_path, 1, status="stopped", stopped_by=by, final_val_loss=1.5)
    sweep = sweep_in(tmp_path, total=2)
    monkeypatch.setattr(telling, "_driven", [(sweep, Teller(sweep))])
    assert telling.report(exits.COMPLETED) == exits.COMPLETED
    printed = capsys.readouterr().out
    assert ("to go on: " in printed) == goes_on
    assert [row.status for row in rows_of(sweep)] == ["completed", "stopped" if goes_on else "completed"]


def test_of_an_earlier_sweep_no_job_is_shown_but_those_that_this_one_has_met(tmp_path: Path):
    for job in (0, 1):
        write(tmp_path, job)
    sweep = Sweep(folder=tmp_path, start=SweepJournal(tmp_path).nbytes)
    assert rows_of(sweep) == []
    sweep.journal.append(JobEvent(event="taken", job=7, folder="1", hash="b", overrides=[], status="completed"))
    for job in (10, 2):
        write(tmp_path, job)
    assert [row.job for row in rows_of(sweep)] == ["2", "7 in 1", "10"]


def test_a_job_without_a_result_runs_or_its_process_is_gone(tmp_path: Path):
    for job in (0, 1):
        (tmp_path / str(job)).mkdir()
        event = JobEvent(event="begun", job=job, folder=str(job), hash="a", overrides=[f"seed={job}"])
        SweepJournal(tmp_path).append(event)
    with locked(tmp_path / "0"):
        rows = rows_of(sweep_in(tmp_path))
    assert [row.status for row in rows] == ["running", "failed"]
    assert rows[0].error is None
    assert "its process is gone" in str(rows[1].error)


def test_the_best_job_is_told_by_the_objective_and_pruned_ones_are_counted(tmp_path: Path, capfd):
    sweep = sweep_in(tmp_path, total=4, settings=SweepConfig(objective="val_accuracy", direction="maximize"))
    teller = Teller(sweep)
    values = [("completed", 0.5), ("completed", 0.75), ("pruned", 0.9), ("completed", 0.6)]
    for job, (status, value) in enumerate(values):
        error = "x" if status == "pruned" else None
        say(tmp_path, "ended", job, status=status, value=value, final_val_loss=9.0 - job, error=error)
    teller.close()
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
    assert [row.job for row in rows_of(sweep)] == ["0", "1"]
    teller = Teller(sweep)
    write(tmp_path, 2, final_val_loss=2.0)
    teller.close()
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("job 2 completed (3/3, 1 failed")
    assert [row.job for row in rows_of(sweep)] == ["0", "1", "2"]


def test_a_study_that_has_all_its_trials_has_nothing_to_go_on_with(tmp_path: Path, monkeypatch, capsys):
    write(tmp_path, 0)
    write(tmp_path, 1, status="failed", error="the disk is full")
    for total, goes_on in ((2, False), (3, True)):
        study = Study(url="sqlite:///study.db", name="sweep", num_trials=total)
        sweep = sweep_in(tmp_path, total=total, study=study)
        monkeypatch.setattr(telling, "_driven", [(sweep, Teller(sweep))])
        assert telling.report(exits.COMPLETED) == exits.FAILED
        assert ("to go on: " in capsys.readouterr().out) == goes_on
