"""Ranks meet in a store, and the wait for those that do not come has an end, and says who they are."""

import itertools
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import zerotrain
from zerotrain.comm.ranks import meeting
from zerotrain.comm.ranks.environment import RankEnvironment
from zerotrain.errors import CommError, ConfigError

ABOVE_ALL_WAITS_S = 60.0


@pytest.fixture
def ranks(tmp_path: Path):
    """(rank, size) -> a rank that meets the others in a file."""

    def make(rank: int, size: int = 3) -> RankEnvironment:
        return RankEnvironment(rank, size, rank, size, "localhost", 1, str(tmp_path / "store"))

    return make


@pytest.fixture(autouse=True)
def the_same_meeting(monkeypatch):
    """For the ranks of a test, which are of one process."""
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))
    monkeypatch.setattr(meeting, "_opened", {})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_wait_until_all_have_come(ranks):
    stores: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        stores[rank] = meeting.meet(ranks(rank), ABOVE_ALL_WAITS_S)

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
    monkeypatch.setattr(meeting, "REMINDER_S", 0.2)
    said = r"ranks 0, 3 did not come within 0\.5 s \(World\.from_environment\(timeout_s=\.\.\.\)\); start all ranks"
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
    with pytest.raises(ConfigError, match="RANK: got 0, as which another process was started too; give each its own"):
        meeting.meet(ranks(0, 2), 0.1)
    come_too = threading.Thread(target=meeting.meet, args=(ranks(1, 2), ABOVE_ALL_WAITS_S))
    come_too.start()
    with pytest.raises(ConfigError, match="WORLD_SIZE: got 3, and rank 0 got 2; give all ranks the same"):
        meeting.meet(ranks(2, 3), ABOVE_ALL_WAITS_S)
    come_too.join()


def test_a_store_of_one_machine_is_reached_from_this_machine_alone():
    port = free_port()
    store = meeting.open_store(RankEnvironment(0, 2, 0, 2, "localhost", port), ABOVE_ALL_WAITS_S)
    listening = [each for each in psutil.Process().net_connections() if each.laddr and each.laddr.port == port]
    assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}
    other = meeting.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), ABOVE_ALL_WAITS_S)
    store.set("said", "by rank 0")
    assert other.get("said") == b"by rank 0"


def test_where_nobody_keeps_the_store_the_wait_ends_and_a_port_that_is_taken_is_refused(monkeypatch, capfd):
    monkeypatch.setattr(meeting, "REMINDER_S", 0.2)
    port = free_port()
    with pytest.raises(CommError, match=rf"rank 0 at localhost:{port} did not come within 0\.5 s"):
        meeting.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), 0.5)
    assert f"rank 1 waits for rank 0 at localhost:{port} (" in capfd.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT={taken}: rank 0 cannot meet the others there: Address al"):
            meeting.open_store(RankEnvironment(0, 2, 0, 2, "127.0.0.1", taken), 0.5)


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
        zerotrain.World.from_environment(device="cpu", timeout_s=0.5)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK: got 2; it must be below WORLD_SIZE=2"):
        zerotrain.World.from_environment(device="cpu")
    assert not dist.is_initialized()
    assert "RANK" in os.environ
