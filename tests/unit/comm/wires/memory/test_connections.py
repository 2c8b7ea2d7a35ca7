"""What ranks of one host say to each other: in order, also where one is slow to read, and up to their end."""

import io
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from zerotrain.comm.wires.memory.connections import Connections
from zerotrain.comm.wires.memory.errand import MESSAGE
from zerotrain.comm.wires.memory.local_peers import LocalPeer


def message(number: int) -> bytes:
    return MESSAGE.pack(1, 0, number, 0, 0)


def number_of(sent: bytes) -> int:
    return int(MESSAGE.unpack(sent)[2])


@pytest.fixture
def two() -> Iterator[tuple[Connections, Connections]]:
    """Those of rank 0, which knows rank 1, and the other way round."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [io.FileIO(os.memfd_create("memory")) for _ in ends]
    made = Connections({1: LocalPeer(ends[0], files[0])}), Connections({0: LocalPeer(ends[1], files[1])})
    yield made
    for each in made:
        if each._wake >= 0:
            each.close()


def test_messages_come_in_order_and_behind_the_last_the_end(two: tuple[Connections, Connections]) -> None:
    one, other = two
    one.send([1], message(1))
    one.send([1], message(2))
    assert [(peer, number_of(sent)) for peer, sent in other.messages()] == [(0, 1), (0, 2)]
    other.require_here([0])
    one.send([1], message(3))
    one.close()
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        other.require_here([0])
    (_, last), end = other.messages()
    assert (number_of(last), end, other.gone) == (3, (0, b""), {0})


def test_who_waits_for_messages_is_woken_up(two: tuple[Connections, Connections]) -> None:
    heard: list[list[tuple[int, bytes]]] = []
    thread = threading.Thread(target=lambda: heard.append(list(two[0].messages())))
    thread.start()
    two[0].wake_up()
    thread.join()
    assert heard == [[]]


def test_what_a_slow_peer_has_no_room_for_is_sent_when_it_has(two: tuple[Connections, Connections]) -> None:
    one, other = two
    count = 20_000
    for number in range(count):
        one.send([1], message(number))
    assert one._unsent[1], "there was room for all"
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += [number_of(sent) for _, sent in other.messages()]
        one.wake_up()
        list(one.messages())
    assert sorted(numbers) == list(range(count))


def test_what_is_unsent_at_the_end_is_sent_to_a_peer_that_reads(two: tuple[Connections, Connections]) -> None:
    one, other = two
    numbers: list[int] = []

    def read() -> None:
        while 0 not in other.gone:
            numbers.extend(number_of(sent) for _, sent in other.messages() if sent)

    for number in range(5000):
        one.send([1], message(number))
    assert one._unsent[1], "there was room for all"
    reader = threading.Thread(target=read)
    reader.start()
    one.finish_sending()
    one.close()
    reader.join()
    assert sorted(numbers) == list(range(5000))
