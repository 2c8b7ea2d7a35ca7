"""A sweep of many jobs: its driver is after the last as it was after the first."""

import sys
import time

import psutil

NUM, FROM = 12, 5
"""Jobs, and the one from which on nothing grows: the first fill caches."""
MAX_GROWTH = 0.5e6
"""Bytes of memory that a further job may cost: Hydra keeps the config of each, 0.2 MB. When the garbage of each job was
frozen, it was 0.9 MB (2026-11-24)."""


def test_a_further_job_costs_the_driver_no_memory_no_files_no_threads_and_no_processes(sweep, tmp_path) -> None:
    (tmp_path / "tmp").mkdir()
    journal = tmp_path / "sweep/sweep.jsonl"
    given = (f"seed=range({NUM})", "launch.nproc_per_node=1", "train.max_steps=1")
    command = sweep("one_more", *given, TMPDIR=str(tmp_path / "tmp"))
    driver, found, fewest_fds = psutil.Process(command.process.pid), {}, {}
    while command.process.poll() is None:
        num = journal.read_text().count('"ended"') if journal.exists() else 0
        try:
            with driver.oneshot():
                found[num] = driver.memory_info().rss, driver.num_threads(), len(driver.children())
                fewest_fds[num] = min(driver.num_fds(), fewest_fds.get(num, sys.maxsize))  # some are open for a moment
        except psutil.Error:  # it has just ended
            break
        assert len(list((tmp_path / "tmp").glob("zerotrain_*"))) <= 1
        time.sleep(0.01)
    assert command.wait() == 0, command.stderr
    last, first = max(each for each in found if each < NUM), min(each for each in found if each >= FROM)
    assert found[last][0] - found[first][0] < MAX_GROWTH * (NUM - FROM)
    assert abs(fewest_fds[last] - fewest_fds[first]) <= 2  # a folder of ranks may be there or not
    assert found[last][1] == found[first][1] == 2
    assert abs(found[last][2] - found[first][2]) <= 1
    assert command.wait_until_gone() == []
    assert not list((tmp_path / "tmp").iterdir())
