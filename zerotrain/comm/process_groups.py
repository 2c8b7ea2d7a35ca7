"""The wire of real ranks: torch's process groups, and which way to send suits which backend.

| backend | gather | ordered reduction | native reduction |
|---|---|---|---|
| gloo, few ranks | posted sends and receives | posted sends and receives | the backend's own |
| gloo, many ranks; NCCL | the backend's own | all-to-all, sum of rows | the backend's own |
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from zerotrain.comm.handles import Exchange, Gather, Handle, Reduction
from zerotrain.comm.journal import Journal
from zerotrain.comm.scratch import Scratch, ScratchPool
from zerotrain.comm.sums import sum_in_rank_order
from zerotrain.comm.wire import Wire
from zerotrain.comm.world import Shards, backend_of

# torch 2.13 renames these two and warns about the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX_RANKS_OF_EXCHANGE = 8
"""Up to here gathers and ordered reductions on gloo are posted sends and receives. gloo's own all-gather receives into
a second buffer as large as the result and copies it over: measured 4 times the CPU time and twice the memory; and its
all-to-all posts a receive behind the send. Posted, each takes two calls a rank, though."""


class ProcessGroups(Wire):
    """The two groups of some `Shards`: gathers and small collectives in one, reductions in the other.

    Args:
        device: where the tensors are; a group may have a backend for each kind of device.
        ordered: reduce by adding in rank order in fp32, whose bits do not depend on where a bucket's borders lie;
            otherwise by the backend's own reduce-scatter.
    """

    def __init__(self, shards: Shards, device: torch.device, *, ordered: bool) -> None:
        self._shards = shards
        self._gathers, self._reductions = _group(shards.gather_group), _group(shards.reduce_group)
        self._is_gloo = backend_of(self._gathers, device) == "gloo"
        self._ordered = ordered
        self._posts = self._is_gloo and shards.size <= MAX_RANKS_OF_EXCHANGE

    def gather(self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        if self._posts:
            return PostedGather(name, journal, full, shard, self._gathers, next(self._shards.tags))
        return NativeGather(name, journal, full, shard, self._gathers, self._is_gloo)

    def reduction(self, name: str, journal: Journal, out: torch.Tensor, pool: ScratchPool) -> Reduction:
        if not self._ordered:
            return NativeReduction(name, journal, out, self._reductions, self._is_gloo)
        if self._posts:
            return PostedReduction(name, journal, out, pool, self._reductions, next(self._shards.tags))
        return OrderedReduction(name, journal, out, pool, self._reductions, self._is_gloo)

    def exchange(
        self,
        name: str,
        journal: Journal,
        sent: torch.Tensor,
        received: torch.Tensor,
        sent_numels: list[int],
        received_numels: list[int],
    ) -> Exchange:
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        numels = (sent_numels, received_numels)
        return AllToAll(name, journal, sent, received, numels, self._reductions, self._is_gloo)

    def gather_small(self, values: torch.Tensor) -> torch.Tensor:
        everyone = values.new_empty(self._shards.size, values.numel())
        with _unseen_by_profiler(self._is_gloo):
            _all_gather(everyone.view(-1), values.contiguous(), group=self._gathers)
        return everyone

    def gather_objects(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._shards.size
        with _unseen_by_profiler(self._is_gloo):
            dist.all_gather_object(everyone, value, group=self._gathers)
        return everyone

    def broadcast(self, values: torch.Tensor) -> None:
        with _unseen_by_profiler(self._is_gloo):
            dist.broadcast(values, group=self._gathers, group_src=0)


class _Works(Handle):
    """A handle on works of torch.distributed."""

    _group: dist.ProcessGroup
    _is_gloo = True
    _works: Sequence[dist.Work | None] = ()

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:  # None is for processes outside the group
                work.wait()
        self._works = ()

    def _done(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)


class NativeGather(_Works, Gather):
    """The backend's own all-gather."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        full: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        is_gloo: bool,
    ) -> None:
        super().__init__(name, journal, full, shard)
        self._group, self._is_gloo = group, is_gloo
        self.sent_nbytes = _ring_nbytes(full, group.size())

    def _issue(self) -> None:
        with _unseen_by_profiler(self._is_gloo):
            self._works = [_all_gather(self.full, self.shard, group=self._group, async_op=True)]


class NativeReduction(_Works, Reduction):
    """The backend's own reduce-scatter, which adds in an order of its own."""

    def __init__(self, name: str, journal: Journal, out: torch.Tensor, group: dist.ProcessGroup, is_gloo: bool) -> None:
        super().__init__(name, journal, out)
        self._group, self._is_gloo = group, is_gloo
        # gloo builds its reduce-scatter from a whole all-reduce, which sends every byte twice.
        passes = 2 if is_gloo else 1
        self.sent_nbytes = out.nbytes * (group.size() - 1) * passes

    def _issue(self) -> None:
        with _unseen_by_profiler(self._is_gloo):
            self._works = [_reduce_scatter(self.out, self._full, group=self._group, async_op=True)]


class OrderedReduction(_Works, Reduction):
    """An all-to-all of the parts, then their sum in rank order in fp32."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        out: torch.Tensor,
        pool: ScratchPool,
        group: dist.ProcessGroup,
        is_gloo: bool,
    ) -> None:
        super().__init__(name, journal, out)
        self._pool, self._group, self._is_gloo = pool, group, is_gloo
        self._received: Scratch | None = None
        self._num_ranks = group.size()
        self.sent_nbytes = out.nbytes * (self._num_ranks - 1)

    def _parts(self) -> torch.Tensor:
        """(ranks, shard_numel) what was received, this rank's own part included."""
        assert self._received is not None
        return self._received.storage[: self._num_ranks * self.out.numel()].view(self._num_ranks, -1)

    def _issue(self) -> None:
        self._received = self._pool.take(self._num_ranks * self.out.numel())
        with _unseen_by_profiler(self._is_gloo):
            received = self._parts().view(-1)
            self._works = [dist.all_to_all_single(received, self._full, group=self._group, async_op=True)]

    def _complete(self) -> None:
        sum_in_rank_order(self._parts(), self.out)
        assert self._received is not None
        self._pool.give_back(self._received)
        self._received = None
        super()._complete()


class AllToAll(_Works, Exchange):
    """torch's all-to-all of parts of any size."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        sent: torch.Tensor,
        received: torch.Tensor,
        numels: tuple[list[int], list[int]],
        group: dist.ProcessGroup,
        is_gloo: bool,
    ) -> None:
        super().__init__(name, journal)
        self._sent, self._received, self._numels = sent, received, numels
        self._group, self._is_gloo = group, is_gloo
        self.sent_nbytes = sent.nbytes

    def _issue(self) -> None:
        sent_numels, received_numels = self._numels
        with _unseen_by_profiler(self._is_gloo):
            work = dist.all_to_all_single(
                self._received, self._sent, received_numels, sent_numels, group=self._group, async_op=True
            )
        self._works = [work]


class _Posted(_Works):
    """One part from every rank to every other: the receives are posted by `prepare`, the sends by `issue`.

    gloo sends a part once its receiver has said that it waits for it, and that word travels behind whatever the
    receiver is sending itself. Posted ahead, no word is late, and both directions of a link are busy at once: on a link
    of 1 Gbit/s an exchange whose receives come behind its sends takes twice the time.

    A tag keeps apart what is under way at the same time: parts of different buckets that met would end the process
    where their sizes differ, and give wrong weights where not.
    """

    _tag: int

    def _peers(self) -> list[int]:
        """The other ranks, beginning behind this one, so that not all begin with the same."""
        size, rank = self._group.size(), self._group.rank()
        return [(rank + distance) % size for distance in range(1, size)]

    def _post(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Receive into part r what comes from rank r."""
        with _unseen_by_profiler(self._is_gloo):
            self._works = [
                dist.irecv(parts[peer], group=self._group, tag=self._tag, group_src=peer) for peer in self._peers()
            ]

    def _end_receives(self, values: torch.Tensor) -> None:
        """Send `values`, which nobody reads, to every rank: a receive that was posted ends by a message, and no other way."""
        self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        self._send([values] * self._group.size())
        self._wait()

    def _send(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Send part r to rank r."""
        with _unseen_by_profiler(self._is_gloo):
            self._works = [
                *self._works,
                *(dist.isend(parts[peer], group=self._group, tag=self._tag, group_dst=peer) for peer in self._peers()),
            ]


class PostedGather(_Posted, Gather):
    """A gather of sends and receives: in place, without the second buffer of gloo's own."""

    def __init__(
        self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, tag: int
    ) -> None:
        super().__init__(name, journal, full, shard)
        self._group, self._tag = group, tag
        self.sent_nbytes = _ring_nbytes(full, group.size())

    def _prepare(self) -> None:
        self._post(self.full.view(self._group.size(), -1))

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        own = self.full.view(self._group.size(), -1)[self._group.rank()]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        self._send([self.shard] * self._group.size())

    def _withdraw(self) -> None:
        self._end_receives(self.shard)


class PostedReduction(_Posted, Reduction):
    """Every part to the rank it belongs to, which adds them in rank order in fp32."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        out: torch.Tensor,
        pool: ScratchPool,
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        super().__init__(name, journal, out)
        self._pool, self._group, self._tag = pool, group, tag
        self._received: Scratch | None = None
        self.sent_nbytes = out.nbytes * (group.size() - 1)

    def _parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        """One part for each rank, in rank order: what was received, and `own`."""
        assert self._received is not None
        num_peers = self._group.size() - 1
        parts = list(self._received.storage[: num_peers * self.out.numel()].view(num_peers, -1))
        parts.insert(self._group.rank(), own)
        return parts

    def _prepare(self) -> None:
        self._received = self._pool.take((self._group.size() - 1) * self.out.numel())
        self._post(self._parts(self.out))

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        assert self._full is not None
        self._send(self._full.view(self._group.size(), -1))

    def _complete(self) -> None:
        assert self._full is not None
        assert self._received is not None
        own = self._full.view(self._group.size(), -1)[self._group.rank()]
        sum_in_rank_order(self._parts(own), self.out, scratch=self._received.storage)
        self._pool.give_back(self._received)
        self._received = None
        super()._complete()

    def _withdraw(self) -> None:
        self._end_receives(self.out)
        assert self._received is not None
        self._pool.give_back(self._received)
        self._received = None


@contextmanager
def _unseen_by_profiler(is_gloo: bool) -> Iterator[None]:
    """Keep gloo's own ranges out of a profile that is being taken.

    torch ends them when the collective does, and if the profiler has stopped by then, writes into memory that was
    freed: 9 of 9 runs with train.profile=true at stage 2 died of SIGSEGV at their end (torch 2.13).
    """
    if not (is_gloo and profiler._is_profiler_enabled):
        yield
        return
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def _ring_nbytes(full: torch.Tensor, num_ranks: int) -> int:
    """Bytes one rank sends when each rank's part of `full` reaches every other rank."""
    return full.nbytes // num_ranks * (num_ranks - 1)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group
