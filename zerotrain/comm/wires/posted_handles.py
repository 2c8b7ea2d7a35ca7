"""Handles made of sends and receives on gloo: the receives are posted ahead."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from zerotrain.comm.handles import Gather, GatherSpec, Reduction, ReductionSpec
from zerotrain.comm.means import mean_by_tree
from zerotrain.comm.wires.backend_handles import Works, ring_nbytes, unseen_by_profiler


class _Posted(Works):
    """One part from every rank to every other: the receives are posted by `prepare`, the sends by `issue`.

    gloo sends a part once its receiver has said that it waits for it, and that word travels behind whatever the
    receiver is sending itself. Posted ahead, no word is late, and both directions of a link are busy at once: on a link
    of 1 Gbit/s an exchange whose receives come behind its sends takes twice the time.

    A tag keeps apart what is under way at the same time: parts of different buckets that met would end the process
    where their sizes differ, and give wrong weights where not.
    """

    def _send_over(self, group: dist.ProcessGroup, tag: int) -> None:
        """To be called once, first."""
        self._group, self._tag = group, tag
        self._rank, self._size = group.rank(), group.size()
        # Beginning behind this rank, so that not all begin with the same.
        self._peers = [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def _post(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Receive into part r what comes from rank r."""
        with unseen_by_profiler(self._is_gloo):
            # Not dist.irecv and dist.isend: they make 9 more Python calls for each peer.
            self._works = [self._group.recv([parts[peer]], peer, self._tag) for peer in self._peers]

    def _end_receives(self, values: torch.Tensor) -> None:
        """Send `values`, which nobody reads, to every rank: only a message ends a receive that was posted."""
        self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)
        self._send([values] * self._size)
        self._wait()

    def _send(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Send part r to rank r."""
        with unseen_by_profiler(self._is_gloo):
            sends = [self._group.send([parts[peer]], peer, self._tag) for peer in self._peers]
            self._works = [*self._works, *sends]


class PostedGather(_Posted, Gather):
    """A gather of sends and receives: in place, without the second buffer of gloo's own."""

    def __init__(self, spec: GatherSpec, group: dist.ProcessGroup, tags: Iterator[int]) -> None:
        super().__init__(spec)
        self._send_over(group, next(tags))
        self.sent_nbytes = ring_nbytes(spec.full, self._size)

    def _prepare(self) -> None:
        self._post(self.full.view(self._size, -1))

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        own = self.full.view(self._size, -1)[self._rank]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        self._send([self.shard] * self._size)

    def _withdraw(self) -> None:
        self._end_receives(self.shard)


class PostedReduction(_Posted, Reduction):
    """Every part to the rank it belongs to, which takes their mean, added by a tree in fp32."""

    def __init__(self, spec: ReductionSpec, group: dist.ProcessGroup, tags: Iterator[int]) -> None:
        super().__init__(spec)
        self._send_over(group, next(tags))
        self.sent_nbytes = self._part_nbytes * (self._size - 1)

    def _parts(self, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """One part for each rank, in rank order."""
        parts = list(received)
        parts.insert(self._rank, own)
        return parts

    def _prepare(self) -> None:
        self._post(self._parts(self._borrow(self._size - 1), self.out))

    def _issue(self) -> None:
        if not self.is_prepared:
            self._prepare()
        assert self._full is not None
        self._send(self._full.view(self._size, -1))

    def _complete(self) -> None:
        assert self._full is not None
        own = self._full.view(self._size, -1)[self._rank]
        mean_by_tree(self._parts(self._received_parts(self._size - 1), own), self.out, self.num_leaves)
        self._give_back()
        super()._complete()

    def _withdraw(self) -> None:
        self._end_receives(self.out.new_zeros(self.out.numel(), dtype=self._pool.dtype))
        self._give_back()
