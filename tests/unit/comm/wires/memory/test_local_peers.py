"""Ranks of one host find each other, keep strangers out, and otherwise agree that they do not."""

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from zerotrain.comm.wire import gather_objects
from zerotrain.comm.wires.memory.errand import THERE, Errand
from zerotrain.comm.wires.memory.local_peers import NotLocalError
from zerotrain.comm.wires.memory.local_ranks import LocalRanks
from zerotrain.comm.wires.memory.shared_memory import read_into
from zerotrain.testing.fake_wire import Board, BoardEnd
from zerotrain.testing.limits import HANG_S

Change = Callable[[int, list[str]], list[str]]
"""(which of its messages it is, the message) -> what a rank says instead"""


def meet(size: int, changes: dict[int, Change]) -> list[Any]:
    """What the ranks, threads of this process, have got: their end of it, or what was raised."""
    board, got = Board(size), [None] * size

    def run(rank: int) -> None:
        end, number = BoardEnd(board, rank), iter(range(10))
        change = changes.get(rank, lambda _, said: said)

        def say(said: list[str]) -> list[Any]:
            return gather_objects(end.gather_small, torch.device("cpu"), change(next(number), said))

        try:
            got[rank] = LocalRanks(rank, range(size), say, HANG_S)
        except Exception as error:
            got[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def open_files() -> set[tuple[str, str]]:
    """(descriptor, name) of each but the one that reads this. Threads of other tests may close some at any time."""
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


def require_they_read_each_other(ranks: list[LocalRanks]) -> None:
    sent = [ranks[rank].memory.zeros(10, torch.float32).fill_(rank) for rank in range(len(ranks))]
    for rank in ranks:
        assert sorted(rank.courier.connections.peers) == list(rank.peers)
        for peer in rank.peers:
            # Or a program that user code starts by os.system would hold all ranks' memory.
            assert not os.get_inheritable(rank.courier.connections.peers[peer].file.fileno())
            target, offset = torch.empty(10), ranks[peer].memory.offset_of(sent[peer])
            read_into(target.data_ptr(), target.nbytes, rank.courier.connections.peers[peer].file.fileno(), offset)
            assert torch.equal(target, sent[peer])


@pytest.mark.parametrize("size", [2, 3, 9])
def test_all_ranks_of_a_host_read_each_other_and_nothing_is_open_afterwards(size: int) -> None:
    before, threads = open_files(), set(threading.enumerate())  # others may end meanwhile
    got = meet(size, {})
    require_they_read_each_other(got)
    assert len(set(threading.enumerate()) - threads) == size
    got.clear()
    assert open_files() <= before
    assert set(threading.enumerate()) <= threads


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory", "a stranger finds the address", "kept out"
)
def test_strangers_who_find_the_address_are_kept_out() -> None:
    """Also more than there are ranks: as many as those took the room in which ranks connect (2026-11-22)."""
    strangers = []

    def be_found(number: int, said: list[str]) -> list[str]:
        if len(said) == 3:  # where it listens
            for hello in (b"x" * 24, b"") * 5:
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                strangers[-1].settimeout(HANG_S)
                strangers[-1].connect(said[1])
                socket.send_fds(strangers[-1], [hello or b"x"], [0] if hello else [])
        return said

    require_they_read_each_other(meet(2, {0: be_found}))
    assert [stranger.recv(100) for stranger in strangers] == [b""] * 10
    for stranger in strangers:
        stranger.close()


def test_another_user_who_connects_and_says_nothing_is_not_waited_for() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    (heard, told), (done, connected) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(os.read(heard, 100))
        os.write(connected, b"x")
        os._exit(0 if stranger.recv(100) == b"" else 1)

    def be_found(number: int, said: list[str]) -> list[str]:
        if len(said) == 3:
            os.write(told, said[1].encode())
            os.read(done, 1)
        return said

    started_s = time.monotonic()
    require_they_read_each_other(meet(2, {0: be_found}))
    assert time.monotonic() - started_s < HANG_S  # which is how long ranks wait for each other
    assert os.waitpid(child, 0)[1] == 0
    for each in (heard, told, done, connected):
        os.close(each)


@pytest.mark.parametrize("call", ["posix_fallocate", "preadv"])
def test_where_such_memory_can_be_made_and_not_used_all_know_why(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found when the engine was built, or trained, and ended the run (2026-11-22)."""

    def forbidden(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, call, forbidden)
    before = open_files()
    errors = meet(2, {})
    why = "rank 0: it cannot make memory that others can read: cannot "
    assert all(isinstance(error, NotLocalError) and str(error).startswith(why) for error in errors), errors
    errors.clear()
    assert open_files() <= before


def elsewhere(number: int, said: list[str]) -> list[str]:
    """As on a host where nobody listens at the address of rank 0."""
    return [said[0], "\0zerotrain-nobody", said[2]] if len(said) == 3 else said


def without_memory(number: int, said: list[str]) -> list[str]:
    return ["no memory"] if number == 0 else said


def too_many_files(number: int, said: list[str]) -> list[str]:
    return ["too many open files"] if number == 3 else said


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "one rank is limited, on another host, or has shared memory off",
)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (elsewhere, "rank 1: it does not reach rank 0, which is on another host or in another network namespace"),
        (without_memory, "rank 0: no memory"),
        (too_many_files, "rank 0: too many open files"),
    ],
    ids=["another host", "no memory", "no thread"],
)
def test_where_one_cannot_all_know_why_and_nothing_is_left(change: Change, why: str) -> None:
    before, threads = open_files(), set(threading.enumerate())  # others may end meanwhile
    errors = meet(3, {0: change})
    assert all(isinstance(error, NotLocalError) and str(error).startswith(why) for error in errors), errors
    errors.clear()
    assert open_files() <= before
    assert set(threading.enumerate()) <= threads


class Read(Errand):
    """Does nothing with what is there."""

    def there(self, peer: int, file: int, offset: int) -> list[int]:
        return [peer]


class Collecting:
    """A connection in whose next send Python collects the engine that uses it."""

    def __init__(self, connection: socket.socket, leave: Callable[[], None]) -> None:
        self._connection, self._leave = connection, leave

    def send(self, *message: Any) -> int:
        self._leave()
        return self._connection.send(*message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_an_engine_that_is_collected_in_a_send_of_its_thread_ends_it() -> None:
    """As from Python 3.12 on, which collects behind calls. The thread waited for a lock of its own (2026-11-23)."""
    one, other = meet(2, {})
    errands = [Read(1, 0, 0, each.peers) for each in (one, other)]
    one.courier.begin(errands[0])
    # The selector knows the socket itself, so only what is sent goes by way of this.
    connection: Any = Collecting(one.courier.connections.peers[1].connection, one.courier.leave)
    peers: Any = one.courier.connections.peers
    peers[1] = replace(peers[1], connection=connection)
    other.courier.begin(errands[1])
    other.courier.tell(errands[1].message(THERE))
    one.courier._thread.join(5.0)
    assert not one.courier._thread.is_alive()
    with pytest.raises(RuntimeError):
        other.courier.wait(errands[1], 5.0)
