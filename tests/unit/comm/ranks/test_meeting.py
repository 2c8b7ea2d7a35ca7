"""Ranks meet in a store, and the wait for those that do not come has an end, and says who they are."""

import itertools
import os
import threading
import time

import pytest
import torch.distributed as dist
from commands import free_port

import zerotrain
from zerotrain.comm import meeting
from zerotrain.comm import meeting as stores
from zerotrain.errors import CommError, ConfigError

ABOVE_ALL_WAITS_S = 60.0


@pytest.fixture(autouse=True)
def the_same_meeting(monkeypatch):
    """For the ranks of a test, which are of one process."""
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))
    monkeypatch.setattr(meeting, "_makings", itertools.repeat(0))
    monkeypatch.setattr(stores, "_opened", {})


def test_ranks_wait_until_all_have_come(ranks):
    stores: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        stores[rank] = meeting.meet(ranks(rank), ABOVE_ALL_WAITS_S).store

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert stores == {}
    come(1)
    for thread in threads:
        thread.join()
    stores[0].set("said", "by rank 0")
    assert stores[2].get("said") == b"by rank 0"


def test_who_does_not_come_is_named_by_the_first_rank_that_is_there_and_the_wait_ends(ranks, monkeypatch, capfd):
    monkeypatch.setattr(stores, "_REMINDER_S", 0.2)
    said = r"ranks 0, 3 did not come within 0\.5 s \(World\.from_environment\(start_timeout_s=\.\.\.\)\); start all "
    failures: list[str] = []

    def come(rank: int) -> None:
        with pytest.raises(CommError, match=said) as failure:
            meeting.meet(ranks(rank, 4), 0.5)
        failures.append(str(failure.value))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 2
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("rank 1 waits for ranks 0, 3 (") and line.endswith(" of 0.5 s)") for line in lines)
    assert not any(line.startswith("rank 2 waits for ranks 0, 3") for line in lines)


def test_two_processes_of_one_rank_and_ranks_of_another_number_are_refused(ranks):
    def come(rank: int) -> None:
        with pytest.raises(CommError):
            meeting.meet(ranks(rank, 2), 0.1)

    come(0)
    with pytest.raises(ConfigError, match="RANK: got 0, which another process has too; give each process its own"):
        meeting.meet(ranks(0, 2), 0.1)
    come_too = threading.Thread(target=meeting.meet, args=(ranks(1, 2), ABOVE_ALL_WAITS_S))
    come_too.start()
    with pytest.raises(ConfigError, match="WORLD_SIZE: got 3, and rank 0 got 2; give all ranks the same"):
        meeting.meet(ranks(2, 3), ABOVE_ALL_WAITS_S)
    come_too.join()


def gave_up(ranks, makes) -> dict[int, CommError]:
    """What each rank raises that makes something with the others."""
    errors: dict[int, CommError] = {}

    def make(rank: int) -> None:
        with pytest.raises(CommError) as failure:
            meeting.make_together(ranks(rank), makes[rank], 1.0)
        errors[rank] = failure.value

    threads = [threading.Thread(target=make, args=(rank,)) for rank in makes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_who_came_and_does_not_join_is_named_by_all_others(ranks):
    over = threading.Event()
    errors = gave_up(ranks, {0: over.wait, 2: over.wait})
    over.set()
    said = "rank 1 came to the meeting of the ranks, and did not join the others: killed, or stopped; rank 0: no answer"
    assert all(str(error).startswith(said) for error in errors.values())
    assert [error.unheard for error in errors.values()] == [(1,), (1,)]
    assert not any(error.is_own for error in errors.values())


@pytest.mark.case("hosts: Ranks of one host", "a rank gets no more files, threads or memory")
def test_who_lacks_something_says_so_and_the_others_do_not_take_it_for_gone(ranks):
    over = threading.Event()

    def lack() -> None:
        raise RuntimeError("can't start new thread")

    errors = gave_up(ranks, {0: over.wait, 1: lack, 2: over.wait})
    over.set()
    lacks = "can't start new thread; this process gets no more threads; raise ulimit -u"
    assert str(errors[1]).startswith(f"rank 1 failed in the meeting of the ranks: {lacks}")
    assert [errors[rank].is_own for rank in range(3)] == [False, True, False]
    for rank in (0, 2):
        assert errors[rank].unheard == ()
        assert f"rank 1: {lacks}" in str(errors[rank])


def test_a_loop_of_ones_own_waits_no_longer_than_it_was_told(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError, match=r"rank 1 did not come within 0\.5 s"):
        zerotrain.World.from_environment(device="cpu", start_timeout_s=0.5)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK: got 2; it must be below WORLD_SIZE=2"):
        zerotrain.World.from_environment(device="cpu")
    assert not dist.is_initialized()
    assert "RANK" in os.environ
