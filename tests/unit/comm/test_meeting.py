"""The store in which ranks meet: who reaches it, and how long a call to it may take."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

import psutil
import pytest
import torch.distributed as dist
from commands import free_port

import zerotrain
from zerotrain.comm import meeting, meeting as stores
from zerotrain.comm.environment import RankEnvironment
from zerotrain.errors import CommError, ConfigError

# Ranks meet in a store, and the wait for those that do not come has an end, and says who they are.


ABOVE_ALL_WAITS_S = 60.0


@pytest.fixture(autouse=True)
def the_same_meeting(monkeypatch):
    """For the ranks of a test, which are of one process."""
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))
    monkeypatch.setattr(meeting, "_makings", itertools.repeat(0))
    monkeypatch.setattr(stores, "_opened", {})


def started(call: Callable[[int], None], ranks: Iterable[int]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def test_ranks_wait_until_all_have_come(ranks):
    stores: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        stores[rank] = meeting.meet(ranks(rank), ABOVE_ALL_WAITS_S).store

    threads = started(come, (2, 0))
    time.sleep(0.1)
    assert stores == {}
    come(1)
    join_all(threads)
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

    join_all(started(come, (1, 2)))
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

    join_all(started(make, makes))
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


def test_a_store_of_one_machine_is_reached_from_this_machine_alone():
    port = free_port()
    store = stores.open_store(RankEnvironment(0, 2, 0, 2, "localhost", port), ABOVE_ALL_WAITS_S)
    listening = [each for each in psutil.Process().net_connections() if each.laddr and each.laddr.port == port]
    assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}
    other = stores.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), ABOVE_ALL_WAITS_S)
    store.set("said", "by rank 0")
    assert other.get("said") == b"by rank 0"


@pytest.mark.parametrize("is_torchruns", [True, False])
def test_ranks_whose_torchruns_count_differently_meet_in_a_store_of_this_attempt_alone(
    ranks, monkeypatch, is_torchruns
):
    """A host that had just joined, and one that had lost another, waited for each other (2026-11-24)."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_torchruns))
    opened = []
    for count in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        opened.append(stores.open_store(ranks(count, 2), ABOVE_ALL_WAITS_S))
    opened[0].set("said", "by rank 0")
    assert opened[1].check(["said"]) is not is_torchruns


def test_no_call_to_a_store_waits_longer_for_who_keeps_it_than_it_may():
    """A pulled cable held one up for a quarter of an hour (2026-11-24)."""
    port = free_port()
    ranks = RankEnvironment(0, 2, 0, 2, "localhost", port)
    stores.open_store(ranks, 7.0)
    assert limits_of_answers(port) == {7000}
    stores.limit_answers(ranks, stores.open_store(ranks, 7.0), 3.0)
    assert limits_of_answers(port) == {3000}


def limits_of_answers(port: int) -> set[int]:
    """Milliseconds after which TCP gives up, of this process's connections to a port that have a limit."""
    limits = set()
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == port:
            with socket.socket(fileno=os.dup(each.fd)) as found:
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                limits.add(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return limits


def test_where_nobody_keeps_the_store_the_wait_ends_and_a_port_that_is_taken_is_refused(monkeypatch, capfd):
    monkeypatch.setattr(stores, "_REMINDER_S", 0.2)
    port = free_port()
    with pytest.raises(CommError, match=rf"rank 0 at localhost:{port} did not come within 0\.5 s"):
        stores.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), 0.5)
    assert f"rank 1 waits for rank 0 at localhost:{port} (" in capfd.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT={taken}: rank 0 cannot meet the others there: Address al"):
            stores.open_store(RankEnvironment(0, 2, 0, 2, "127.0.0.1", taken), 0.5)


@pytest.mark.case(
    "hosts: Ranks of one host", "a loop of your own whose rank is killed, at any moment after all have come"
)
def test_a_keeper_that_was_there_and_is_gone_is_told_of_and_not_waited_for(monkeypatch):
    """It was waited for as one that is late, for twice the timeout (2026-11-23)."""
    monkeypatch.setattr(stores, "STORE_LIMIT_S", 1.0)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]

    def be_gone() -> None:
        server.accept()[0].close()
        server.close()

    keeper = threading.Thread(target=be_gone)
    keeper.start()
    with pytest.raises(CommError, match=rf"rank 0 at localhost:{port}, which keeps the store .* was there and is gone"):
        stores.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), ABOVE_ALL_WAITS_S)
    keeper.join()


def test_who_listens_and_says_nothing_is_no_keeper(monkeypatch):
    """It was waited for without an end (2026-11-23)."""
    monkeypatch.setattr(stores, "STORE_LIMIT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT={port}: rank 1 cannot meet the others there: no answer"):
            stores.open_store(RankEnvironment(1, 2, 1, 2, "localhost", port), ABOVE_ALL_WAITS_S)


def test_who_keeps_the_store_is_the_last_to_leave_it_and_waits_not_for_long(monkeypatch):
    """The other still read how a save had ended, and took it for failed (2026-11-24)."""
    port = free_port()
    kept, other = (stores.open_store(RankEnvironment(rank, 2, rank, 2, "localhost", port), 10.0) for rank in (0, 1))
    keeper = threading.Thread(target=stores.leave, args=(dist.PrefixStore("world/0", kept), 2))
    keeper.start()
    keeper.join(0.3)
    assert keeper.is_alive()
    stores.leave(dist.PrefixStore("world/0", other), 2)
    keeper.join()
    monkeypatch.setattr(stores, "STORE_LIMIT_S", 0.1)
    stores.leave(dist.PrefixStore("world/1", kept), 2)
