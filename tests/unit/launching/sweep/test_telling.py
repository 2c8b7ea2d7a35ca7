"""What the user of a running sweep sees: lines, one line of progress in a terminal, and a report that is kept."""

import json
import os
import pty
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.report.folders import job
from zerotrain.launching.sweep import telling as kept_report
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.telling import KeptReport, StatusLine, Teller
from zerotrain.report.files import HEADS, PAGE_NAME
from zerotrain.report.journal import JobEvent, SweepJournal
from zerotrain.testing.ranks import HANG_S


def say(folder: Path, event: str, number: int, **fields) -> JobEvent:
    overrides = [f"seed={number}"]
    said = JobEvent(event=event, job=number, folder=str(number), hash="a", overrides=overrides, **fields)
    SweepJournal(folder).append(said)
    return said


def rows_in(folder: Path) -> list[tuple[str, str]]:
    said = json.loads((folder / "sweep.json").read_text())
    lines = (folder / "sweep.csv").read_text().splitlines()[1:]
    rows = [(each["job"], each["status"]) for each in said["jobs"]]
    assert [(line.split(",")[0], line.split(",")[2]) for line in lines] == rows
    return rows


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


def test_the_report_is_written_after_each_job_and_its_page_not_so_often(tmp_path: Path, monkeypatch):
    kept = KeptReport(Sweep(folder=tmp_path, start=0))
    say(tmp_path, "begun", 0)
    kept.look()
    assert not HEADS.keys() & {path.name for path in tmp_path.iterdir()}
    job(tmp_path / "0", ["seed=0"])
    say(tmp_path, "ended", 0, status="completed")
    say(tmp_path, "begun", 1)
    kept.look()
    assert rows_in(tmp_path) == [("0", "completed"), ("1", "failed")]
    page = (tmp_path / PAGE_NAME).read_text()
    say(tmp_path, "ended", 1, status="failed", error="the third batch is unlucky")
    kept.look()
    assert rows_in(tmp_path) == [("0", "completed"), ("1", "failed")]
    assert "the third batch is unlucky" in (tmp_path / "sweep.csv").read_text()
    assert (tmp_path / PAGE_NAME).read_text() == page
    monkeypatch.setattr(kept_report, "_PAGE_EVERY_S", 0.0)
    kept.look()
    assert "the third batch is unlucky" in (tmp_path / PAGE_NAME).read_text()
    state = {name: (tmp_path / name).stat().st_mtime_ns for name in HEADS}
    kept.look()
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in HEADS} == state
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_of_the_user_s_own_is_no_reason_to_end_and_stays(tmp_path: Path):
    (tmp_path / "sweep.csv").write_text("mine")
    kept = KeptReport(Sweep(folder=tmp_path, start=0))
    say(tmp_path, "refused", 0, status="failed", error="zero.stage: got 9")
    kept.look()
    assert (tmp_path / "sweep.csv").read_text() == "mine"


def test_a_terminal_shows_the_running_jobs_in_one_line(tmp_path: Path):
    job(tmp_path / "3", losses=[5.0, None, 2.31], status="stopped")
    (tmp_path / "3/config.yaml").write_text("train:\n  max_steps: 400\n")
    (tmp_path / "3/metrics.jsonl").open("a").write('{"step": 30, "val_loss": 1}\n{"step": 40, "train_l')
    job(tmp_path / "4", losses=[None])
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


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_pipe_and_a_dumb_terminal_get_lines_alone(tmp_path: Path, monkeypatch, term: str | None):
    last = [say(tmp_path, "begun", 0)]
    if term:
        monkeypatch.setenv("TERM", term)
        with terminal() as (ours, theirs):
            StatusLine(os.fdopen(os.dup(theirs), "w"), tmp_path).draw(last)
            assert seen(ours) == ""
    else:
        with (tmp_path / "out").open("w") as out:
            StatusLine(out, tmp_path).draw(last)
        assert (tmp_path / "out").read_text() == ""


def test_lines_take_the_place_of_the_progress(tmp_path: Path):
    before = os.dup(1)
    with terminal() as (ours, theirs):
        os.dup2(theirs, 1)
        teller = Teller(Sweep(folder=tmp_path, start=0, in_driver=False, output="summary"))
        os.dup2(before, 1)
        say(tmp_path, "begun", 0)
        text = ""
        while "job 0 starts" not in text:
            select.select([ours], [], [], HANG_S)
            text += (told := seen(ours))
            assert told
        say(tmp_path, "ended", 0, status="completed", final_val_loss=2.5)
        teller.close()
        text += seen(ours)
    os.close(before)
    assert text.split("\r\n") == [
        "job 0 begins in 0: seed=0",
        "\r\x1b[Kjob 0 starts\r\x1b[Kjob 0 completed with loss 2.5000 (1 done, best 2.5000 job 0)",
        "",
    ]
