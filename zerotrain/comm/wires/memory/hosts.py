"""Ranks of several hosts, each of which reads the memory of those of its own."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.comm.scratch import ScratchPool
from zerotrain.comm.wires.backend_handles import unseen_by_profiler
from zerotrain.comm.wires.memory.arrivals import Arrivals, Passage, wait_for
from zerotrain.comm.wires.memory.local_peers import NotLocalError, require_all
from zerotrain.comm.wires.memory.local_ranks import LocalRanks

_NUM_SHOWN = 8


def ranks_of_host(names: Sequence[str], rank: int, max_hosts: int) -> range:
    """The ranks that are to read each other's memory, this one among them: all, or those of its host.

    A host's are a whole subtree of the tree by which gradients are added: neighbours, as many on each host, and a power
    of two of them.

    Args:
        names: the hosts of all ranks.

    Raises:
        NotLocalError: hosts hold other ranks than that; on all ranks alike.
    """
    if len(set(names)) == 1:
        return range(len(names))
    blocks = [(name, len(list(block))) for name, block in itertools.groupby(names)]
    num_local = blocks[0][1]
    if num_local == 1 and len(set(names)) == len(names):
        raise NotLocalError("each rank is on a host, or in a network namespace, of its own")
    is_whole = all(num == num_local for _, num in blocks) and len(blocks) == len(set(names))
    if not is_whole or num_local < 2 or num_local & (num_local - 1) or len(blocks) > max_hosts:
        raise NotLocalError(
            f"the ranks by host are {_by_host(names)}; to share memory, all hosts must have the same number of "
            f"neighbouring ranks, a power of two from 2 on, and there may be {max_hosts} hosts at most"
        )
    first = rank - rank % num_local
    return range(first, first + num_local)


def _by_host(names: Sequence[str]) -> str:
    """Such as "0-3 | 4-7"."""
    hosts: dict[str, list[str]] = {}
    first = 0
    for name, block in itertools.groupby(names):
        last = first + len(list(block)) - 1
        hosts.setdefault(name, []).append(f"{first}" if first == last else f"{first}-{last}")
        first = last + 1
    shown = [", ".join(runs[:_NUM_SHOWN]) + (", ..." if len(runs) > _NUM_SHOWN else "") for runs in hosts.values()]
    return " | ".join(shown[:_NUM_SHOWN]) + (" | ..." if len(shown) > _NUM_SHOWN else "")


class Hosts:
    """All ranks of an engine, as a rank sees them that reads the memory of its own host's. Its *column* are the ranks
    at its place on each host: to these alone it sends, and receives from them, through sockets.

    Args:
        local: the ranks of this host.
        num_hosts: that hold as many each.
    """

    def __init__(self, local: LocalRanks, num_hosts: int) -> None:
        self.local, self.num_hosts = local, num_hosts
        self.host = local.rank // local.size
        """This one's number."""
        self.arrivals = Arrivals(local.courier.close)
        self.roots = ScratchPool(dtype=torch.float32, device=torch.device("cpu"))
        """Sums over the ranks of a host."""
        weakref.finalize(self, self.arrivals.leave)

    @property
    def num_ranks(self) -> int:
        """On all hosts."""
        return self.num_hosts * self.local.size

    def column_of(self, full: torch.Tensor, place: int | None = None) -> torch.Tensor:
        """(hosts, numel / ranks): of one part for each rank those of the ranks at a place, by default this rank's."""
        return full.view(self.num_hosts, self.local.size, -1)[:, self.local.place if place is None else place]


def meet_hosts(local: LocalRanks, num_hosts: int, say: Callable[[Any], list[Any]]) -> Hosts:
    """`Hosts` on all ranks. Collective.

    Raises:
        NotLocalError: a rank has no thread for it; on all ranks alike.
    """
    hosts, why = None, ""
    try:
        hosts = Hosts(local, num_hosts)
    except RuntimeError as error:  # such as "can't start new thread"
        why = str(error)
    require_all(say, why)
    assert hosts is not None
    return hosts


class Column:
    """A handle's sends to and receives from its rank's column. They have a tag of their own."""

    def __init__(self, hosts: Hosts, group: dist.ProcessGroup, tag: int) -> None:
        self._hosts, self._group, self._tag = hosts, group, tag
        # Beginning behind this host, so that not all begin with the same.
        others = [(hosts.host + distance) % hosts.num_hosts for distance in range(1, hosts.num_hosts)]
        self._peers = [(host, host * hosts.local.size + hosts.local.place) for host in others]
        self.received: list[Passage] = []
        """Receives under way."""
        self.sent: list[Passage] = []

    def receive(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Post the receive of part h from host h."""
        with unseen_by_profiler(is_gloo=True):
            for host, rank in self._peers:
                work = dist.irecv(parts[host], group=self._group, tag=self._tag, group_src=rank)
                assert work is not None
                self.received.append(Passage(parts[host], rank, work))

    def send(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Send part h to host h; from any thread."""
        with unseen_by_profiler(is_gloo=True):
            for host, rank in self._peers:
                work = dist.isend(parts[host], group=self._group, tag=self._tag, group_dst=rank)
                assert work is not None
                self.sent.append(Passage(parts[host], rank, work))

    def take_received(self) -> list[Passage]:
        """Hand over the receives under way: the caller waits for them."""
        received, self.received = self.received, []
        return received

    def wait(self) -> None:
        """For all that is sent and received.

        Raises:
            RuntimeError: a rank did not come, or is gone; the other ranks of this host are told.
        """
        try:
            wait_for(self.received)
            wait_for(self.sent)
        except RuntimeError as error:
            self._hosts.local.courier.close(str(error))
            raise
        self.received, self.sent = [], []
