"""A rank counts as alive as long as its own process is there, and no longer."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from zerotrain.launching.presence import Presence, RankState, read_states

WITH_A_WORKER = """
import os, sys, time
from pathlib import Path
from zerotrain.launching.presence import Presence
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


def test_a_rank_at_work_is_seen_alive_until_it_is_done(tmp_path: Path):
    presence = Presence(tmp_path, 0)
    presence.enter("training")
    assert [(state.phase, alive) for state, alive in read_states(tmp_path)] == [("training", True)]
    presence.begin(12)
    assert [state.last_seen for state, _ in read_states(tmp_path)] == ["training, step 12"]
    presence.leave()
    assert read_states(tmp_path) == []


@pytest.mark.parametrize("text", ["x", "ü", "訓", "\\", "\x1b", "\ud800", "\U0001d54f"])
def test_what_a_rank_says_can_be_read_however_long_it_is(tmp_path: Path, text: str):
    """Characters of Japanese have six bytes in JSON: of a path of 130 there was no room (2026-11-23)."""
    presence = Presence(tmp_path, 0)
    presence.enter(f"loading {5000 * text}")
    presence.fail(f"OSError: {5000 * text}")
    [(state, alive)] = read_states(tmp_path)
    assert alive
    assert state.phase.startswith(f"loading {80 * text}")
    assert state.failed is not None
    assert state.failed.startswith(f"OSError: {80 * text}")


def test_of_the_many_ranks_of_a_job_all_that_are_gone_are_told(tmp_path: Path):
    """Of more than 150 a stopped rank could not be read, and so counted as one that had done its work (2026-11-23)."""
    gone = range(1, 1000)
    for rank in gone:
        said = asdict(RankState(rank, "training"))
        (tmp_path / f"{rank}.state").write_text(f"{0:<16}" + json.dumps(said))
    presence = Presence(tmp_path, 0)
    presence.enter("訓" * 5000)
    assert not presence.note_stop(signal.SIGTERM, in_order=True)
    [stopped] = [state for state, _ in read_states(tmp_path) if state.rank == 0]
    assert (stopped.stopped_by, sorted(stopped.gone)) == ("SIGTERM", [*gone])


def test_rank_0_gives_a_sign_of_life_with_its_phases_and_steps(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    alive = tmp_path / "alive"
    Presence(tmp_path / "ranks", 1).enter("training")
    assert not alive.exists()
    presence = Presence(tmp_path / "ranks", 0)
    assert alive.exists()
    for sign in (lambda: presence.begin(3), lambda: presence.enter("saving")):
        os.utime(alive, times=(0, 0))
        time.sleep(1.1)
        sign()
        assert alive.stat().st_mtime > 0
