"""Handles of ranks on several hosts: inside a host parts are read from memory, across they are sent to the column."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from zerotrain.comm.handles import Gather, GatherSpec, Reduction, ReductionSpec
from zerotrain.comm.means import mean_by_tree
from zerotrain.comm.scratch import Scratch
from zerotrain.comm.wires.backend_handles import ring_nbytes
from zerotrain.comm.wires.memory.errand import THERE, Errand
from zerotrain.comm.wires.memory.hosts import Column, Hosts
from zerotrain.comm.wires.memory.shared_handles import ReductionErrand, Shared, read_in_slices


class _Across(Shared):
    """A handle of some `Hosts`."""

    def _join_hosts(self, hosts: Hosts, group: dist.ProcessGroup, tag: int) -> None:
        """To be called once, first."""
        self._join(hosts.local, tag)
        self._hosts, self._column = hosts, Column(hosts, group, tag)

    def _wait(self) -> None:
        if self._errand is not None:
            super()._wait()
        self._column.wait()

    def _done(self) -> bool:
        return False  # of sends it is not known


class AcrossGather(_Across, Gather):
    """A gather over hosts: a rank sends its shard to its column, and its host's others read what it has received. If
    they cannot read `full`, it receives into memory that they can read, and copies.
    """

    def __init__(self, spec: GatherSpec, hosts: Hosts, group: dist.ProcessGroup, tags: Iterator[int]) -> None:
        super().__init__(spec)
        self._join_hosts(hosts, group, next(tags))
        self.sent_nbytes = ring_nbytes(spec.full, hosts.num_ranks)

    def _prepare(self) -> None:
        self._column.receive(self._parts())

    def _parts(self) -> torch.Tensor:
        """(hosts, numel / ranks) that the ranks of this host can read, to receive into."""
        if self._ranks.memory.offset_of(self.full) is not None:
            return self._hosts.column_of(self.full)
        nbytes = self._hosts.num_hosts * self.shard.nbytes
        if self._staged is None:
            self._staged = self._ranks.borrow(nbytes, stays=self.is_used_again)
        return self._staged.storage[:nbytes].view(self.full.dtype).view(self._hosts.num_hosts, -1)

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        parts, column = self._parts(), self._hosts.column_of(self.full)
        if parts[self._hosts.host].data_ptr() != self.shard.data_ptr():
            parts[self._hosts.host].copy_(self.shard)
        self._column.send([self.shard] * self._hosts.num_hosts)
        offset = self._ranks.memory.offset_of(parts)
        assert offset is not None
        # Where the parts lie apart, and where not, is the same on all ranks, as all memory is; if not, they are told.
        code = self._code ^ (self._staged is not None)
        part_stride = parts.stride(0) * parts.itemsize
        self._errand = _ColumnsErrand(self._number, code, self._hosts, self.full, self.shard.nbytes, part_stride)
        self._errand.sent = (self.full, self._staged)
        self._ranks.courier.begin(self._errand)
        copied = None if self._staged is None else (column, parts)
        message = self._errand.message(THERE, offset)
        self._hosts.arrivals.tell(self._column.take_received(), copied, self._ranks.courier.tell, message)

    def _withdraw(self) -> None:
        self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        self._column.send([self.shard] * self._hosts.num_hosts)
        self._wait()
        self._unstage()


class _ColumnsErrand(Errand):
    """Reads the columns of this host's other ranks.

    Args:
        part_stride: bytes from a part to the next of a column, where it is read.
    """

    def __init__(self, number: int, code: int, hosts: Hosts, full: torch.Tensor, nbytes: int, part_stride: int) -> None:
        super().__init__(number, code, nbytes, hosts.local.peers)
        self._hosts, self._full, self._part_stride = hosts, full, part_stride

    def there(self, peer: int, file: int, offset: int) -> Iterable[int]:
        column = self._hosts.column_of(self._full, peer % self._hosts.local.size)
        for host, part in enumerate(column):
            place = offset + host * self._part_stride
            read_in_slices(part.data_ptr(), self.nbytes, file, place, self._hosts.local.courier)
        return (peer,)


class _RootsErrand(ReductionErrand):
    """Adds up, and sends the sums."""

    def __init__(
        self, number: int, code: int, hosts: Hosts, full: torch.Tensor, roots: torch.Tensor, column: Column
    ) -> None:
        place, part = hosts.local.place, roots.shape[1]
        outs = {(host * hosts.local.size + place) * part: root for host, root in enumerate(roots)}
        super().__init__(number, code, hosts.local, full, outs, 1)
        self._roots, self._column = roots, column

    def all_read(self) -> None:
        self._column.send(self._roots)


class AcrossReduction(_Across, Reduction):
    """A reduction in which a rank adds up what its host's ranks have for its column, and sends each of the column its
    sum: the root of a subtree, in fp32."""

    def __init__(self, spec: ReductionSpec, hosts: Hosts, group: dist.ProcessGroup, tags: Iterator[int]) -> None:
        super().__init__(spec)
        self._join_hosts(hosts, group, next(tags))
        self.sent_nbytes = self._part_nbytes * (hosts.num_ranks - 1)
        self._lent: list[Scratch] = []
        self._roots: list[torch.Tensor] = []
        """This rank's part of each host's sum over its ranks, fp32."""

    def _prepare(self) -> None:
        self._roots = list(self._borrow_roots())
        self._column.receive(self._roots)

    def _borrow_roots(self) -> torch.Tensor:
        """(hosts, numel / ranks) fp32"""
        numel = self._hosts.num_hosts * self.out.numel()
        self._lent.append(self._hosts.roots.take(numel))
        return self._lent[-1].storage[:numel].view(self._hosts.num_hosts, -1)

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        assert self._full is not None
        # In fp32 in place: what a rank has for its column nobody else reads.
        sent = self._hosts.column_of(self._full)
        if sent.dtype != torch.float32:
            sent = self._borrow_roots()
        self._roots[self._hosts.host] = sent[self._hosts.host]
        errand = _RootsErrand(self._number, self._code, self._hosts, self._full, sent, self._column)
        self._send(errand, self._full)

    def _complete(self) -> None:
        mean_by_tree(self._roots, self.out, self.num_leaves)
        self._end()
        super()._complete()

    def _withdraw(self) -> None:
        self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        self._column.send(self._borrow_roots())
        self._wait()
        self._end()

    def _end(self) -> None:
        while self._lent:
            self._hosts.roots.give_back(self._lent.pop())
        self._roots = []
