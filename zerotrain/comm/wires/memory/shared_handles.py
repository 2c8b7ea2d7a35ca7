"""Handles of ranks that read each other's memory: nothing is received but into where it belongs."""

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from zerotrain.comm.handles import Gather, GatherSpec, Handle, Reduction, ReductionSpec, Watch
from zerotrain.comm.means import BLOCK_NUMEL, CHUNK_NUMEL, mean_by_tree
from zerotrain.comm.scratch import Scratch
from zerotrain.comm.wires.backend_handles import ring_nbytes
from zerotrain.comm.wires.memory.courier import Courier
from zerotrain.comm.wires.memory.errand import THERE, Errand
from zerotrain.comm.wires.memory.local_ranks import LocalRanks
from zerotrain.comm.wires.memory.shared_memory import read_into

_SLICE_NBYTES = 2**23
"""Read at a time: a thread that is to end looks for that between two."""


class Shared(Handle):
    """A handle of some `LocalRanks`. `wait` returns once all peers have read its data, which may not change before."""

    _errand: Errand | None = None
    """While it is under way."""
    _staged: Scratch | None = None

    def _join(self, ranks: LocalRanks, number: int) -> None:
        """To be called once, first."""
        self._ranks, self._number = ranks, number
        self._code = zlib.crc32(f"{self.kind} {self.name}".encode())

    def _send(self, errand: Errand, sent: torch.Tensor) -> None:
        offset = self._ranks.memory.offset_of(sent)
        if offset is None:
            self._staged, offset = self._ranks.stage(sent, stays=self.is_used_again)
        self._errand, errand.sent = errand, (sent, self._staged)
        self._ranks.courier.begin(errand)
        self._ranks.courier.tell(errand.message(THERE, offset))

    def _wait(self) -> None:
        assert self._errand is not None
        self._ranks.courier.wait(self._errand, self._ranks.timeout_s)
        self._errand = None
        self._unstage()

    def _unstage(self) -> None:
        if self._staged is not None:
            self._ranks.unstage(self._staged, stays=self.is_used_again)
            self._staged = None

    def _done(self) -> bool:
        return self._errand is not None and self._errand.is_done


class SharedGather(Shared, Gather):
    """A gather in which every rank reads the others' shards to where they belong."""

    def __init__(self, spec: GatherSpec, ranks: LocalRanks, numbers: Iterator[int]) -> None:
        super().__init__(spec)
        self._join(ranks, next(numbers))
        self.sent_nbytes = ring_nbytes(spec.full, ranks.size)

    def _issue(self) -> None:
        own = self.full.view(self._ranks.size, -1)[self._ranks.rank]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        self._send(_GatherErrand(self._number, self._code, self._ranks, self.full, self.shard.nbytes), self.shard)


class _GatherErrand(Errand):
    def __init__(self, number: int, code: int, ranks: LocalRanks, full: torch.Tensor, nbytes: int) -> None:
        super().__init__(number, code, nbytes, ranks.peers)
        self._full, self._courier = full, ranks.courier

    def there(self, peer: int, file: int, offset: int) -> Iterable[int]:
        read_in_slices(self._full.data_ptr() + peer * self.nbytes, self.nbytes, file, offset, self._courier)
        return (peer,)


def read_in_slices(address: int, nbytes: int, file: int, offset: int, courier: Courier) -> None:
    """See `read_into`. RuntimeError also where the courier is to end."""
    for start in range(0, nbytes, _SLICE_NBYTES):
        courier.require_going_on()
        read_into(address + start, min(_SLICE_NBYTES, nbytes - start), file, offset + start)


class SharedReduction(Shared, Reduction):
    """A reduction in which every rank reads its part of the others' buffers, and takes the mean, added by a tree in
    fp32, in chunks that stay in the cache."""

    def __init__(self, spec: ReductionSpec, ranks: LocalRanks, numbers: Iterator[int]) -> None:
        super().__init__(spec)
        self._join(ranks, next(numbers))
        self.sent_nbytes = self._part_nbytes * (ranks.size - 1)

    def _issue(self) -> None:
        assert self._full is not None
        outs = {self._ranks.rank * self.out.numel(): self.out}
        errand = ReductionErrand(self._number, self._code, self._ranks, self._full, outs, self.num_leaves)
        errand.watch, self._watch = self._watch, None
        self._send(errand, self._full)


class ReductionErrand(Errand):
    """Takes means over the ranks of this host.

    Args:
        outs: where to leave the mean of the elements of `full` from a place on, by that place; it may lie there.
        num_leaves: that are divided by.
    """

    watch: Watch | None = None
    """Is told the pieces of the mean, where it is of one place."""

    def __init__(
        self,
        number: int,
        code: int,
        ranks: LocalRanks,
        full: torch.Tensor,
        outs: Mapping[int, torch.Tensor],
        num_leaves: int,
    ) -> None:
        super().__init__(number, code, full.nbytes, ranks.peers)
        self._place, self._courier, self._rows = ranks.place, ranks.courier, ranks.rows
        self._full, self._outs, self._num_leaves = full, outs, num_leaves
        self._places: dict[int, tuple[int, int]] = {}
        """(file, offset) of what a peer sends."""

    def there(self, peer: int, file: int, offset: int) -> Iterable[int]:
        self._places[peer] = (file, offset)
        if self.not_there:
            return ()
        for first, out in self._outs.items():
            self._take_mean(first, out)
        return tuple(self._places)

    def _take_mean(self, first: int, out: torch.Tensor) -> None:
        size, itemsize = len(self._places) + 1, self._full.itemsize
        pairs = (size + 1) // 2
        step = max(1, CHUNK_NUMEL // pairs // BLOCK_NUMEL) * BLOCK_NUMEL  # `mean_by_tree` adds as many at a time
        numel = min(step, out.numel())
        rows = self._rows.of("read", self._full.dtype, size - 1, numel)
        sums = self._rows.of("add", torch.float32, pairs, numel)
        peers = sorted(self._places.items())
        for start in range(0, out.numel(), step):
            self._courier.require_going_on()
            mean = out[start : start + step]
            own = self._full[first + start : first + start + mean.numel()]
            parts = []
            for row, (_, (peer_file, place)) in zip(rows, peers, strict=True):
                read_into(row.data_ptr(), own.nbytes, peer_file, place + (first + start) * itemsize)
                parts.append(row[: own.numel()])
            parts.insert(self._place, own)
            mean_by_tree(parts, mean, self._num_leaves, sums=sums)
            if self.watch is not None:
                self.watch(start, mean)
