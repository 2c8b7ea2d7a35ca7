"""Where ranks meet: a loopback interface of their own, or hosts joined by a link of a given rate.

Hosts are network namespaces. Each is held by a process that ends when its standard input closes, so that a namespace
and its interfaces vanish with the benchmark, however that ends. No root is needed where user namespaces are allowed.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

LINKS_BIT_PER_S = {"100mbit": 100_000_000, "1gbit": 1_000_000_000, "10gbit": 10_000_000_000}


@dataclass(frozen=True)
class Host:
    """A place for ranks."""

    address: str
    interface: str | None = None
    """The interface between ranks, whose bytes are all the benchmark's own; None where others use it too."""
    command_prefix: tuple[str, ...] = ()
    """What to put before a command to run it there."""

    @property
    def process(self) -> int:
        """That lives as long as the place, where that is not this machine as it is."""
        return int(_pid(self.command_prefix))


@dataclass(frozen=True)
class Network:
    """Each host has as many neighbouring ranks; the first host's address is where ranks meet."""

    hosts: tuple[Host, ...]
    bit_per_s: int | None = None
    """Rate of the link in each direction; None where it is not limited."""

    def host_of(self, rank: int, num_ranks: int) -> Host:
        """The place of a rank."""
        return self.hosts[rank * len(self.hosts) // num_ranks]


SHARED = Network((Host("127.0.0.1"),))
"""This machine as it is. Nobody can tell the bytes of a run from those of others."""


@contextmanager
def loopback() -> Iterator[Network]:
    """One namespace with nothing but its own loopback interface.

    Raises:
        BenchmarkError: namespaces are not allowed here.
    """
    with namespace(("unshare", "--map-root-user", "--net")) as prefix:
        run(prefix, "ip link set lo up")
        yield Network((Host("127.0.0.1", "lo", prefix),))


@contextmanager
def link(rate: str) -> Iterator[Network]:
    """Two namespaces joined by a veth pair, each end shaped to `rate`, a key of LINKS_BIT_PER_S.

    Raises:
        BenchmarkError: namespaces are not allowed here, or a tool of iproute2 is missing.
    """
    with ExitStack() as stack:
        first = stack.enter_context(namespace(("unshare", "--map-root-user", "--net")))
        second = stack.enter_context(namespace((*first, "unshare", "--net")))
        hosts = [Host("10.0.0.1", "host0", first), Host("10.0.0.2", "host1", second)]
        run(first, f"ip link add host0 type veth peer name host1 netns {_pid(second)}")
        for host in hosts:
            run(host.command_prefix, "ip link set lo up")
            run(host.command_prefix, f"ip address add {host.address}/24 dev {host.interface}")
            run(host.command_prefix, f"ip link set {host.interface} up")
            run(
                host.command_prefix,
                f"tc qdisc add dev {host.interface} root tbf rate {rate} burst 256kb latency 50ms",
            )
        yield Network(tuple(hosts), LINKS_BIT_PER_S[rate])


def sent_nbytes(interface: str) -> int:
    """Bytes this process's namespace has sent over `interface` since it exists."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise BenchmarkError(f"there is no network interface {interface} here")


@contextmanager
def namespace(unshare: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the command prefix that enters a new namespace, which vanishes at the end with its interfaces.

    Args:
        unshare: the command that makes it; `--uts` in it gives it a host name of its own.

    Raises:
        BenchmarkError: namespaces are not allowed here, or a tool is missing.
    """
    _require("unshare", "nsenter", "ip", "tc")
    holder = subprocess.Popen(
        [*unshare, "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the benchmark, which then closes the namespace.
        start_new_session=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            reason = holder.stderr.read().strip()
            raise BenchmarkError(
                f"this machine allows no network namespaces ({reason}); root or user namespaces are needed"
            )
        kinds = ("--user", "--net", *(kind for kind in unshare if kind == "--uts"))
        yield ("nsenter", "--target", str(holder.pid), *kinds, "--preserve-credentials")


def _pid(prefix: Sequence[str]) -> str:
    return prefix[prefix.index("--target") + 1]


def _require(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise BenchmarkError(f"{', '.join(missing)} not found; install iproute2 and util-linux")


def run(prefix: Sequence[str], command: str) -> None:
    """Run a command of a few words in a namespace; BenchmarkError where it fails."""
    done = subprocess.run([*prefix, *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"`{command}` failed in a network namespace: {done.stderr.strip()}")
