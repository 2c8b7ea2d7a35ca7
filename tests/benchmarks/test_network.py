"""The networks of the benchmarks: private, shaped, and gone when the benchmark is."""

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.network import Host, Network, link, loopback


@contextmanager
def unless_forbidden(network: AbstractContextManager[Network]) -> Iterator[Network]:
    try:
        opened = network.__enter__()
    except BenchmarkError as error:
        pytest.skip(str(error))
    try:
        yield opened
    finally:
        network.__exit__(None, None, None)


def run(host: Host, *command: str) -> str:
    return subprocess.run([*host.command_prefix, *command], capture_output=True, text=True, check=True).stdout


def interfaces(host: Host) -> list[str]:
    lines = run(host, "cat", "/proc/self/net/dev").splitlines()[2:]
    return sorted(line.split(":")[0].strip() for line in lines)


def test_two_hosts_share_a_shaped_link_and_nothing_else_until_it_is_closed_and_the_loopback_is_alone() -> None:
    with unless_forbidden(loopback()) as network:
        assert network.host_of(0, 2) == network.host_of(1, 2)
        assert interfaces(network.host_of(0, 2)) == ["lo"]
    with unless_forbidden(link("1gbit")) as network:
        places = [network.host_of(rank, 4) for rank in range(4)]
        assert places == [*network.hosts[:1] * 2, *network.hosts[1:] * 2]
        for host in network.hosts:
            assert interfaces(host) == sorted(["lo", host.interface])
            assert "rate 1Gbit" in run(host, "tc", "qdisc", "show", "dev", host.interface)
        assert network.bit_per_s == 1_000_000_000
    with pytest.raises(subprocess.CalledProcessError):
        run(host, "true")
