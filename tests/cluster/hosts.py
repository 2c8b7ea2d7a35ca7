"""Hosts on this machine: network namespaces with names of their own, joined by a bridge whose cables can be pulled."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from commands import REPOSITORY, Command

from benchmarks.network import Host, namespace, run
from tests.zygote.client import Server, Zygote

INTERFACE = "e0"
"""Of each host, beside its loopback."""
_ports = count(29400)
"""No two runs of a session meet at one."""


@dataclass(frozen=True)
class Hosts:
    """Host k is called n<k>, at 10.78.0.<k + 1>."""

    hosts: tuple[Host, ...]
    zygotes: tuple[Zygote, ...]
    """Of each host, the process that commands are forked from there."""
    bridge: tuple[str, ...]
    """What to put before a command to run it where the bridge is."""

    def cut(self, number: int) -> None:
        """Pull the cable of a host: nothing comes or goes any more, and nobody is told."""
        run(self.bridge, f"ip link set port{number} down")

    def mend(self, number: int) -> None:
        """Put it in again."""
        run(self.bridge, f"ip link set port{number} up")

    def start(self, num_hosts: int, num_local: int, *arguments: str, folder: Path, **environment: str) -> list[Command]:
        """Start `launch.py` as each rank of a run on the first hosts, as srun would; returns them by rank."""
        size, port = num_hosts * num_local, next(_ports)
        met = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(num_local)}
        met |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": str(port)}
        return [
            self.command(
                rank // num_local,
                [str(REPOSITORY / "launch.py"), *arguments],
                folder,
                {**met, "RANK": str(rank), "LOCAL_RANK": str(rank % num_local), **environment},
            )
            for rank in range(size)
        ]

    def by_torchrun(self, host: int, options: Sequence[str], *arguments: str, folder: Path, **more: str) -> Command:
        """Start torchrun on one host. The hosts have no name service, so that it is told its own address.

        Args:
            more: variables of its environment.
        """
        options = (*options, f"--local-addr={self.hosts[host].address}")
        return self.command(
            host,
            ["-m", "torch.distributed.run", *options, str(REPOSITORY / "launch.py"), *arguments],
            folder,
            more,
        )

    def meeting(self, kind: str) -> list[tuple[str, ...]]:
        """The options by which the torchruns of all hosts meet at the first one: static or c10d; by host."""
        address, port = self.hosts[0].address, next(_ports)
        if kind == "c10d":
            common = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", "--rdzv-id=job")
            return [(*common, f"--rdzv-conf=is_host={number == 0}") for number in range(len(self.hosts))]
        at = (f"--master-addr={address}", f"--master-port={port}")
        return [(*at, f"--node-rank={number}") for number in range(len(self.hosts))]

    def command(self, host: int, arguments: list[str], folder: Path, environment: dict[str, str]) -> Command:
        """Start this Python on a host."""
        return Command([sys.executable, *arguments], folder, environment, self.zygotes[host].start)


@contextmanager
def joined_hosts(num_hosts: int, folder: Path) -> Iterator[Hosts]:
    """So many hosts, which vanish at the end.

    Args:
        folder: for what is printed on them.

    Raises:
        BenchmarkError: namespaces are not allowed here, or a tool of iproute2 is missing.
    """
    with ExitStack() as stack:
        bridge = stack.enter_context(namespace(("unshare", "--map-root-user", "--net")))
        run(bridge, "ip link add bridge type bridge")
        run(bridge, "ip link set bridge up")
        hosts, servers, zygotes = [], [], []
        for number in range(num_hosts):
            prefix = stack.enter_context(namespace((*bridge, "unshare", "--net", "--uts")))
            host = Host(f"10.78.0.{number + 1}", INTERFACE, prefix)
            run(bridge, f"ip link add port{number} type veth peer name {INTERFACE} netns {host.process}")
            run(bridge, f"ip link set port{number} master bridge")
            run(bridge, f"ip link set port{number} up")
            run(prefix, f"hostname n{number}")
            run(prefix, "ip link set lo up")
            run(prefix, f"ip address add {host.address}/24 dev {INTERFACE}")
            run(prefix, f"ip link set {INTERFACE} up")
            own = folder / f"n{number}"
            os.mkdir(own)
            server = Server(own, prefix)
            stack.callback(server.close)
            hosts.append(host)
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
            zygotes.append(stack.enter_context(closing(Zygote(server.folder, server.folder))))
        yield Hosts(tuple(hosts), tuple(zygotes), bridge)
