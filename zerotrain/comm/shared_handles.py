"""Handles of ranks that read each other's memory: nothing is received but into where it belongs."""

import zlib
from collections.abc import Iterable

import torch

from zerotrain.comm.backend_handles import ring_nbytes
from zerotrain.comm.errand import Errand
from zerotrain.comm.handles import BLOCK_NUMEL, CHUNK_NUMEL, Gather, Handle, Reduction, Watch, mean_by_tree
from zerotrain.comm.journal import Journal
from zerotrain.comm.local_ranks import LocalRanks
from zerotrain.comm.scratch import Scratch, ScratchPool
from zerotrain.comm.shared_memory import read_into

_SLICE_NBYTES = 2**23
"""Read at a time: a thread that is to end looks for that between two."""


class _Shared(Handle):
    """A handle of some `LocalRanks`. What it sends may not change until all have read it: that is a part of waiting."""

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
        self._ranks.courier.send(errand, offset)

    def _wait(self) -> None:
        assert self._errand is not None
        self._ranks.courier.wait(self._errand, self._ranks.timeout_s)
        self._errand = None
        if self._staged is not None:
            self._ranks.unstage(self._staged, stays=self.is_used_again)
            self._staged = None

    def _done(self) -> bool:
        return self._errand is not None and self._errand.is_done


class SharedGather(_Shared, Gather):
    """A gather in which every rank reads the others' shards to where they belong."""

    def __init__(
        self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor, ranks: LocalRanks, number: int
    ) -> None:
        super().__init__(name, journal, full, shard)
        self._join(ranks, number)
        self.sent_nbytes = ring_nbytes(full, ranks.size)

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
        address = self._full.data_ptr() + peer * self.nbytes
        for start in range(0, self.nbytes, _SLICE_NBYTES):
            self._courier.require_going_on()
            read_into(address + start, min(_SLICE_NBYTES, self.nbytes - start), file, offset + start)
        return (peer,)


class SharedReduction(_Shared, Reduction):
    """A reduction in which every rank reads its part of the others' buffers, and takes the mean, added by a tree in
    fp32, in chunks that stay in the cache."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        out: torch.Tensor,
        pool: ScratchPool,
        num_leaves: int,
        ranks: LocalRanks,
        number: int,
    ) -> None:
        super().__init__(name, journal, out, pool, num_leaves)
        self._join(ranks, number)
        self.sent_nbytes = self._part_nbytes * (ranks.size - 1)

    def _issue(self) -> None:
        assert self._full is not None
        errand = _ReductionErrand(self._number, self._code, self._ranks, self._full, self.out, self.num_leaves)
        errand.watch, self._watch = self._watch, None
        self._send(errand, self._full)


class _ReductionErrand(Errand):
    watch: Watch | None = None

    def __init__(
        self, number: int, code: int, ranks: LocalRanks, full: torch.Tensor, out: torch.Tensor, num_leaves: int
    ) -> None:
        super().__init__(number, code, full.nbytes, ranks.peers)
        self._rank, self._courier, self._rows = ranks.rank, ranks.courier, ranks.rows
        self._own, self._out, self._num_leaves = full.view(ranks.size, -1)[ranks.rank], out, num_leaves
        self._places: dict[int, tuple[int, int]] = {}
        """(file, offset) of the part that is this rank's, by peer."""

    def there(self, peer: int, file: int, offset: int) -> Iterable[int]:
        self._places[peer] = (file, offset + self._rank * self._own.nbytes)
        if self.not_there:
            return ()
        size, itemsize = len(self._places) + 1, self._own.itemsize
        pairs = (size + 1) // 2
        step = max(1, CHUNK_NUMEL // pairs // BLOCK_NUMEL) * BLOCK_NUMEL  # `mean_by_tree` adds as many at a time
        numel = min(step, self._own.numel())
        rows = self._rows.of("read", self._own.dtype, size - 1, numel)
        sums = self._rows.of("add", torch.float32, pairs, numel)
        peers = sorted(self._places.items())
        for start in range(0, self._own.numel(), step):
            self._courier.require_going_on()
            own = self._own[start : start + step]
            parts = []
            for row, (_, (peer_file, place)) in zip(rows, peers, strict=True):
                read_into(row.data_ptr(), own.nbytes, peer_file, place + start * itemsize)
                parts.append(row[: own.numel()])
            parts.insert(self._rank, own)
            mean = self._out[start : start + step]
            mean_by_tree(parts, mean, self._num_leaves, sums=sums)
            if self.watch is not None:
                self.watch(start, mean)
        return tuple(self._places)
