"""A rank counts as alive as long as its own process is there, and no longer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.launching.end.presence import Presence, read_states

WITH_A_WORKER = """
import os, sys, time
from pathlib import Path
from zerotrain.launching.end.presence import Presence
presence = Presence(Path(sys.argv[1]), 3)
if os.fork() == 0:
    print(os.getpid(), flush=True)  # by now it has closed what it does not need of the rank's
time.sleep(3600)
"""


@pytest.fixture
def rank(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", WITH_A_WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    yield process
    process.kill()
    os.kill(worker, signal.SIGKILL)  # it holds the pipe too
    process.communicate()


def alive_in(folder: Path) -> list[tuple[int, bool]]:
    return [(state.rank, alive) for state, alive in read_states(folder)]


def test_a_killed_rank_is_gone_though_a_worker_of_it_lives_on(tmp_path: Path, rank: subprocess.Popen):
    assert alive_in(tmp_path) == [(3, True)]
    rank.kill()
    rank.wait()
    assert alive_in(tmp_path) == [(3, False)]


def test_a_rank_that_has_done_its_work_has_no_state(tmp_path: Path):
    presence = Presence(tmp_path, 0)
    assert alive_in(tmp_path) == [(0, True)]
    presence.leave()
    assert alive_in(tmp_path) == []
