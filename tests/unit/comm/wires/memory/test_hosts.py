"""Which ranks read each other's memory, by the hosts that they are on."""

import os
import subprocess

import pytest

from zerotrain.comm.ranks.hosts import host_name
from zerotrain.comm.wires.memory.hosts import ranks_of_host
from zerotrain.comm.wires.memory.local_peers import NotLocalError


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aaa", ["012"]),
        ("aabb", ["01", "23"]),
        ("aabbcc", ["01", "23", "45"]),
        ("aaaabbbb", ["0123", "4567"]),
    ],
)
def test_the_ranks_of_a_host_read_each_others_memory(names: str, expected: list[str]) -> None:
    got = ["".join(map(str, ranks_of_host(names, rank, 8))) for rank in range(len(names))]
    assert got == [block for block in expected for _ in block]


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "hosts of 1, of 3, of different numbers or of scattered ranks",
    "all send by sockets, to the same bits, and say how the ranks lie",
)
@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("abbb", "the ranks by host are 0 | 1-3; "),
        ("aaab", "the ranks by host are 0-2 | 3; "),
        ("aaabbb", "the ranks by host are 0-2 | 3-5; "),
        ("abab", "the ranks by host are 0, 2 | 1, 3; "),
        ("aabbaa", "the ranks by host are 0-1, 4-5 | 2-3; "),
        ("aabbccddee", "the ranks by host are 0-1 | 2-3 | 4-5 | 6-7 | 8-9; "),
        ("ab", "each rank is on a host, or in a network namespace, of its own"),
        ("".join(chr(97 + number // 2) for number in range(20)), "by host .* | ...; "),
    ],
)
def test_otherwise_it_is_said_how_the_ranks_lie(names: str, why: str) -> None:
    told = set()
    for rank in range(len(names)):
        with pytest.raises(NotLocalError, match=why.replace("|", r"\|")) as raised:
            ranks_of_host(names, rank, 4)
        told.add(str(raised.value))
    assert len(told) == 1


def test_a_network_namespace_is_a_host_of_its_own() -> None:
    command = ["unshare", "--map-root-user", "--net", "stat", "-L", "-c", "%i", "/proc/self/ns/net"]
    try:
        elsewhere = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if elsewhere.returncode:
        pytest.skip("needs a network namespace of its own")
    here = str(os.stat("/proc/self/ns/net").st_ino)
    assert here in host_name()
    assert elsewhere.stdout.strip() != here
