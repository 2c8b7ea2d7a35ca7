"""A sweep of many jobs: its driver is after the last as it was after the first."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from commands import Command

NUM, FROM = 12, 5
"""Jobs, and the one from which on nothing grows: the first fill caches."""
MAX_GROWTH = 0.5e6
"""Bytes of memory that a further job may cost: Hydra keeps the config of each, 0.2 MB. When the garbage of each job was
frozen, it was 0.9 MB (2026-11-24)."""


def test_a_further_job_costs_the_driver_no_memory_no_files_no_threads_and_no_processes(
    sweep: Callable[..., Command], tmp_path: Path
):
    (tmp_path / "tmp").mkdir()
    journal = tmp_path / "sweep/sweep.jsonl"
    given = (f"seed=range({NUM})", "launch.nproc_per_node=1", "train.max_steps=1")
    command = sweep("one_more", *given, TMPDIR=str(tmp_path / "tmp"))
    driver, found = psutil.Process(command.process.pid), {}
    while command.process.poll() is None:
        num = journal.read_text().count('"ended"') if journal.exists() else 0
        try:
            with driver.oneshot():
                found[num] = driver.memory_info().rss, driver.num_fds(), driver.num_threads(), len(driver.children())
        except psutil.Error:  # it has just ended
            break
        assert len(list((tmp_path / "tmp").glob("zerotrain_*"))) <= 1
        time.sleep(0.01)
    assert command.wait() == 0, command.stderr
    last = found[max(each for each in found if each < NUM)]
    first = found[min(each for each in found if each >= FROM)]
    assert last[0] - first[0] < MAX_GROWTH * (NUM - FROM)
    assert abs(last[1] - first[1]) <= 4  # at another moment of a job; one that stays of each job would be 6
    assert last[2] == first[2] == 2
    assert abs(last[3] - first[3]) <= 1
    assert command.wait_until_gone() == []
    assert not list((tmp_path / "tmp").iterdir())
