"""How a torchrun ends whose store does not answer: no unit test, since it failed once among many processes."""

import os
import signal
import time
from pathlib import Path

from zerotrain.comm.environment import RankEnvironment
from zerotrain.files.terminal import LastingStream
from zerotrain.launching import torchrun


def test_a_torchrun_that_takes_no_note_of_its_ranks_end_is_killed_unless_it_could_start_them_again(
    tmp_path: Path, monkeypatch
):
    """A process stands for torchrun, whose child ends as the first rank of a host does that is cut off."""
    monkeypatch.setattr(torchrun, "_TORCHRUN_LIMIT_S", 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    first = RankEnvironment(rank=1, world_size=2, local_rank=0, local_world_size=1)
    alone = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1)
    started = {
        name: _torchrun(tmp_path / f"{name}.txt", *given)
        for name, given in {
            "looks": (first, 0, True),
            "restarts": (first, 1, False),
            "one host": (alone, 0, False),
            "rank lives": (first, 0, False, False),
        }.items()
    }
    time.sleep(1.0)  # so that the others' time is up before
    started["hangs"] = _torchrun(tmp_path / "hangs.txt", first, 0, looks=False)
    deadline, ended = time.monotonic() + 30.0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(started["hangs"], os.WNOHANG)
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert (tmp_path / "hangs.txt").read_text().endswith("as its ranks have ended: it is killed\n")
    time.sleep(0.5)
    for name in ("looks", "restarts", "one host", "rank lives"):
        assert os.waitpid(started[name], os.WNOHANG) == (0, 0)
        os.kill(started[name], signal.SIGKILL)
        os.waitpid(started[name], 0)
        assert (tmp_path / f"{name}.txt").read_text() == ""


def _torchrun(said: Path, ranks: RankEnvironment, max_restarts: int, looks: bool, ends: bool = True) -> int:
    """Fork a process that forks a rank, which ends at once or not; return its number."""
    if pid := os.fork():
        return pid
    with open(said, "w") as terminal:
        if (rank := os.fork()) == 0:
            try:
                os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(max_restarts)
                torchrun._let_torchrun_end(ranks, LastingStream(terminal))
                time.sleep(0.0 if ends else 60.0)
            finally:
                os._exit(1)
    if looks:
        os.waitpid(rank, 0)
    time.sleep(60.0)
    os._exit(0)
