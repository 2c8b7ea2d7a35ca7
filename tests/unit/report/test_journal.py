"""sweep.jsonl: whole lines of many processes, whatever else somebody has written there."""

import multiprocessing
import os
from pathlib import Path

import pytest

from zerotrain.errors import ConfigError
from zerotrain.report.journal import JOURNAL_NAME, JobEvent, SweepJournal


def event(job: int, **fields) -> JobEvent:
    return JobEvent(**{"event": "begun", "job": job, "folder": str(job), "hash": "a", "overrides": ["seed=1"]} | fields)


def append_many(folder: Path, first: int) -> None:
    for job in range(first, first + 50):
        SweepJournal(folder).append(event(job, overrides=["x" * 5000]))


def test_lines_of_many_processes_are_whole(tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=append_many, args=(tmp_path, first)) for first in (0, 1000, 2000)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    jobs = [each.job for each in SweepJournal(tmp_path).events()]
    assert sorted(jobs) == [first + job for first in (0, 1000, 2000) for job in range(50)]
    assert [job for job in jobs if job < 1000] == list(range(50))


def test_a_line_that_a_killed_process_has_left_half_spoils_no_other(tmp_path: Path):
    journal = SweepJournal(tmp_path)
    journal.append(event(0))
    with journal.path.open("a") as file:
        file.write('{"event": "begun", "job": 1, "fol')
    assert [each.job for each in journal.events()] == [0]
    journal.append(event(2))
    assert [each.job for each in journal.events()] == [0, 2]
    assert [each.job for each in SweepJournal(tmp_path).events()] == [0, 2]


def test_a_job_that_is_yet_to_begin_is_told_to_the_other_processes_alone(tmp_path: Path):
    journal = SweepJournal(tmp_path)
    journal.append(event(0, event="placed"))
    assert journal.events() == []
    assert [each.event for each in journal.events(placed=True)] == ["placed"]


def test_a_line_without_an_end_hides_no_job(tmp_path: Path):
    (tmp_path / JOURNAL_NAME).write_bytes(b"x" * (2**26 + 5))
    journal = SweepJournal(tmp_path)
    assert journal.events() == []
    journal.append(event(1))
    assert [each.job for each in journal.events()] == [1]
    assert [each.job for each in SweepJournal(tmp_path).events()] == [1]


def test_what_was_said_before_a_sweep_is_told_from_what_it_says(tmp_path: Path):
    journal = SweepJournal(tmp_path)
    journal.append(event(0))
    start = journal.nbytes
    journal.append(event(1, status="completed", final_val_loss=2.5))
    assert [each.job for each in journal.events(start)] == [1]
    assert journal.events()[1] == journal.events(start)[0]
    journal.path.unlink()
    journal.append(event(7))
    assert [each.job for each in journal.events()] == [7]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path, make):
    make(tmp_path / JOURNAL_NAME)
    with pytest.raises(ConfigError, match=r"^hydra.sweep.dir: got .*, whose sweep.jsonl cannot be written: "):
        SweepJournal(tmp_path).append(event(0))
    assert SweepJournal(tmp_path).events() == []
