"""The collectives of the engine: a gather of shards, a reduction to shards, and two small ones.

Each is issued at once and returns a handle; `overlap=False` waits for it before it returns, so both ways
issue the same work in the same order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World

# torch 2.13 renames these two and warns about the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX_RANKS_OF_DIRECT_GATHER = 8
"""Up to here an all-gather on gloo is made of sends and receives. gloo's own receives into a second buffer as large as
the result and copies it over: measured 4 times the CPU time and twice the memory. It is two calls a rank, though."""


class Pending:
    """A collective under way. It keeps its tensors alive until it was waited for."""

    def __init__(self, works: Sequence[dist.Work], *tensors: torch.Tensor) -> None:
        self._works = works
        self.tensors = tensors

    def done(self) -> bool:
        """Whether `wait` would return at once (on CUDA: whether the device has finished).

        False also where that is not known: gloo's sends and receives do not tell before they were waited for.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Make what follows come after it: on CPU the host waits, on CUDA the current stream does."""
        for work in self._works:
            work.wait()
        self._works = ()


class Collectives:
    """What the engine sends over the groups of a `World`, counted in a `Ledger`. In a world of one, nothing is sent.

    Args:
        ordered: reduce by all-to-all and a local sum in rank order in fp32, whose bits do not depend on
            where a bucket's borders lie; otherwise by the backend's own reduce-scatter.
    """

    def __init__(self, world: World, *, ledger: Ledger, ordered: bool, overlap: bool) -> None:
        self.world = world
        self.ledger = ledger
        self.ordered = ordered and world.size > 1
        self.overlap = overlap
        # gloo builds its reduce-scatter from a whole all-reduce, which sends every byte twice.
        gloo_native = not ordered and world.device.type == "cpu"
        self._reduce_passes = 2 if gloo_native else 1
        self._gathers_directly = world.device.type == "cpu" and world.size <= MAX_RANKS_OF_DIRECT_GATHER
        self._num_exchanges = 0

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """All-gather: fill `full` (numel) from every rank's `shard` (numel / ranks), which may lie inside it."""
        if self.world.size == 1:
            return Pending(())
        self.ledger.record("gather", self._ring_nbytes(full))
        if self._gathers_directly:
            return self._issued(self._exchange(full, shard), full, shard)
        work = _all_gather(full, shard, group=self.world.gather_group, async_op=True)
        return self._issued([work], full, shard)

    def _exchange(self, full: torch.Tensor, shard: torch.Tensor) -> list[dist.Work]:
        """Send `shard` to every other rank and receive theirs where they belong."""
        parts = full.view(self.world.size, -1)
        if parts[self.world.rank].data_ptr() != shard.data_ptr():
            parts[self.world.rank].copy_(shard)
        # A tag of its own keeps exchanges apart that are under way at the same time.
        self._num_exchanges += 1
        group, tag, size = self.world.gather_group, self._num_exchanges, self.world.size
        works: list[dist.Work | None] = []
        for distance in range(1, size):
            target, source = (self.world.rank + distance) % size, (self.world.rank - distance) % size
            works.append(dist.isend(shard, group=group, tag=tag, group_dst=target))
            works.append(dist.irecv(parts[source], group=group, tag=tag, group_src=source))
        return [work for work in works if work is not None]

    def received_numel(self, full_numel: int) -> int:
        """Elements of scratch that a reduction of `full_numel` elements needs, 0 for none."""
        return full_numel - self._left_out(full_numel) if self.ordered else 0

    def reduce(self, full: torch.Tensor, received: torch.Tensor | None, out: torch.Tensor) -> Pending:
        """Start the reduce-scatter of `full` (numel); once waited for, `finish_reduce` leaves the sum in `out`.

        Args:
            full: this rank's unreduced gradient; must stay as it is until finished.
            received: scratch of `received_numel` elements, for the ordered reduction only.
            out: this rank's shard (numel / ranks), of the same dtype as `full`. It may lie inside `full`.
        """
        if self.world.size == 1:
            return Pending(())
        self.ledger.record("reduce", self._ring_nbytes(full) * self._reduce_passes)
        group = self.world.reduce_group
        if received is None:
            return self._issued([_reduce_scatter(out, full, group=group, async_op=True)], full, out)
        shard_numel, sent = full.numel() // self.world.size, full
        splits = [shard_numel] * self.world.size
        if self._left_out(full.numel()):
            splits[self.world.rank] = 0
            sent = full[shard_numel:] if self.world.rank == 0 else full[:-shard_numel]
        work = dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
        return self._issued([work], full, received)

    def _left_out(self, full_numel: int) -> int:
        """Elements of this rank's own part, where an all-to-all can leave it out: at one end of the buffer.

        It need not be copied from one buffer to another. Between the parts of other ranks there is no way round it.
        """
        at_an_end = self.world.rank in (0, self.world.size - 1)
        return full_numel // self.world.size if at_an_end else 0

    def finish_reduce(self, full: torch.Tensor, received: torch.Tensor | None, out: torch.Tensor) -> None:
        """A reduction was waited for: leave the sum over ranks in `out`, added in rank order in fp32 if ordered."""
        if received is None:
            return
        own = full.view(self.world.size, -1)[self.world.rank]
        parts = list(received.view(-1, own.numel()))
        if len(parts) == self.world.size:
            parts[self.world.rank] = own
        else:
            parts.insert(self.world.rank, own)
        total = parts[0].to(torch.float32)
        # The sums on the way go over what was received: `out` may be one of the parts still to be added.
        on_the_way = received[: own.numel()] if received.dtype == torch.float32 else total
        for part in parts[1:-1]:
            total = torch.add(total, part, out=on_the_way)
        if out.dtype == torch.float32:
            torch.add(total, parts[-1], out=out)
        else:
            out.copy_(torch.add(total, parts[-1], out=on_the_way))

    def gather_small(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) on each rank -> (ranks, n) on every rank, waited for."""
        if self.world.size == 1:
            return values.view(1, -1)
        everyone = values.new_empty(self.world.size, values.numel())
        self.ledger.record("norm", self._ring_nbytes(everyone))
        _all_gather(everyone.view(-1), values.contiguous(), group=self.world.gather_group)
        return everyone

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's values on every rank, waited for."""
        if self.world.size == 1:
            return
        self.ledger.record("broadcast", values.nbytes if self.world.rank == 0 else 0)
        dist.broadcast(values, group=self.world.gather_group, group_src=0)

    def _ring_nbytes(self, full: torch.Tensor) -> int:
        """Bytes one rank sends when each rank's part of `full` reaches (or comes from) every other rank."""
        return full.nbytes // self.world.size * (self.world.size - 1)

    def _issued(self, works: Sequence[dist.Work], *tensors: torch.Tensor) -> Pending:
        pending = Pending(works, *tensors)
        if not self.overlap:
            pending.wait()
        return pending
