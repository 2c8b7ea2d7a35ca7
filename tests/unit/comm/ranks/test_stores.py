"""The store in which ranks meet: who reaches it, and how long a call to it may take."""

import os
import socket
import threading

import psutil
import pytest
import torch.distributed as dist
from commands import free_port

from zerotrain.comm import meeting as stores
from zerotrain.comm.environment import RankEnvironment
from zerotrain.errors import CommError, ConfigError

ABOVE_ALL_WAITS_S = 60.0


@pytest.fixture(autouse=True)
def no_store_of_another_test(monkeypatch):
    monkeypatch.setattr(stores, "_opened", {})


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
    "hosts: Ranks of one host",
    "a loop of your own whose rank is killed, at any moment after all have come",
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
