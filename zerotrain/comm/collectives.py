"""The collectives of the engine: a gather of shards, a reduction to shards, and two small ones.

Each is issued at once and returns a handle; `overlap=False` waits for it before it returns, so both ways
issue the same work in the same order.
"""

import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler

from zerotrain.comm.exchange import Exchange
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.errors import CommError

# torch 2.13 renames these two and warns about the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX_RANKS_OF_EXCHANGE = 8
"""Up to here gathers and ordered reductions on gloo are an `Exchange`. gloo's own all-gather receives into a second
buffer as large as the result and copies it over: measured 4 times the CPU time and twice the memory; and its all-to-all
posts a receive behind the send. An exchange is two calls a rank, though."""
NUM_ROWS_WIDENED = 64
"""Ranks' parts of a reduction of 16 bits that are in fp32 at a time."""
ORDER_BITS = 52
"""Of the hash of the order of collectives: an integer that fp64 holds exactly."""

P = ParamSpec("P")
R = TypeVar("R")


class Pending:
    """A collective under way. It keeps its tensors alive until it was waited for."""

    lost_others: Callable[[RuntimeError, float], CommError] | None = None
    """What to raise for an error of the backend, after so many seconds."""

    def __init__(self, works: Sequence[dist.Work], *tensors: torch.Tensor | None) -> None:
        self._works = works
        self.tensors = tensors

    def done(self) -> bool:
        """Whether `wait` would return at once (on CUDA: whether the device has finished).

        False also where that is not known: gloo's sends and receives do not tell before they were waited for.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Make what follows come after it: on CPU the host waits, on CUDA the current stream does.

        Raises:
            CommError: the other ranks did not come, or are gone.
        """
        started_s = time.monotonic()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            if self.lost_others is None:
                raise
            raise self.lost_others(error, time.monotonic() - started_s) from error
        self._works = ()


def _announced(
    what: str, *, counts: bool = True
) -> Callable[[Callable[Concatenate["Collectives", P], R]], Callable[Concatenate["Collectives", P], R]]:
    """Let a collective's order be counted, and its failure be told with its name: its argument `name`.

    A profiler does not see gloo's own ranges. torch ends them when the collective does, and if the profiler has stopped
    by then, writes into memory that was freed: such runs died of a segmentation fault at their end.

    Args:
        counts: False for what only prepares a collective.
    """

    def around(issue: Callable[Concatenate["Collectives", P], R]) -> Callable[Concatenate["Collectives", P], R]:
        @functools.wraps(issue)
        def announced(self: "Collectives", *args: P.args, **kwargs: P.kwargs) -> R:
            collective = (what, str(kwargs["name"]))
            if counts:
                self._note(*collective)
            hides = self._is_gloo and profiler._is_profiler_enabled
            if hides:
                torch.autograd._enable_record_function(False)
            started_s = time.monotonic()
            try:
                issued = issue(self, *args, **kwargs)
            except RuntimeError as error:
                raise self._lost_others(collective, error, time.monotonic() - started_s) from error
            finally:
                if hides:
                    torch.autograd._enable_record_function(True)
            if isinstance(issued, Pending):
                issued.lost_others = functools.partial(self._lost_others, collective)
            return issued

        return announced

    return around


class Collectives:
    """What the engine sends over the groups of a `World`, counted in a `Ledger`. In a world of one, nothing is sent.

    Each collective has a `name`, the same on every rank, and those of which several may be under way a `tag` that tells
    them apart.

    Args:
        ordered: reduce by all-to-all and a local sum in rank order in fp32, whose bits do not depend on
            where a bucket's borders lie; otherwise by the backend's own reduce-scatter.
    """

    def __init__(self, world: World, *, ledger: Ledger, ordered: bool, overlap: bool) -> None:
        self.world = world
        self.ledger = ledger
        self.ordered = ordered and world.size > 1
        self.overlap = overlap
        self._is_gloo = world.device.type == "cpu"
        # gloo builds its reduce-scatter from a whole all-reduce, which sends every byte twice.
        self._reduce_passes = 2 if self._is_gloo and not ordered else 1
        self._exchanges = self._is_gloo and 1 < world.size <= MAX_RANKS_OF_EXCHANGE
        self._orders: Counter[str] = Counter()

    @property
    def order(self) -> int:
        """A hash of the names of all collectives so far, in the order of each kind; equal where that is equal."""
        # Between kinds the order may differ: a reduction that ends is followed by a gather, whenever it ends.
        return functools.reduce(lambda total, kind: total ^ self._orders[kind], self._orders, 0)

    def _note(self, what: str, name: str) -> None:
        self._orders[what] = (self._orders[what] * 1_000_003 + _code(name) + 1) % 2**ORDER_BITS

    def _lost_others(self, collective: tuple[str, str], error: RuntimeError, waited_s: float) -> CommError:
        return self.world.whereabouts.lost_others(error, " of ".join(collective), waited_s)

    @_announced("gather", counts=False)
    def expect_gather(self, full: torch.Tensor, tag: int, *, name: str) -> Exchange | None:
        """Be ready to receive what `gather` will put into `full`; until then only this rank's part of it may change."""
        if not self._exchanges:
            return None
        return Exchange(_group(self.world.gather_group), tag=tag, parts=full.view(self.world.size, -1))

    @_announced("gather")
    def gather(
        self, full: torch.Tensor, shard: torch.Tensor, tag: int, *, name: str, expected: Exchange | None = None
    ) -> Pending:
        """All-gather: fill `full` (numel) from every rank's `shard` (numel / ranks), which may lie inside it.

        Args:
            expected: what `expect_gather` gave for `full`, where it was called ahead.
        """
        if self.world.size == 1:
            return Pending(())
        expected = expected or self.expect_gather(full, tag, name=name)
        self.ledger.record("gather", self._ring_nbytes(full))
        if expected is None:
            work = _all_gather(full, shard, group=self.world.gather_group, async_op=True)
            return self._issued([work], full, shard)
        own = full.view(self.world.size, -1)[self.world.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return self._issued(expected.send([shard] * self.world.size), full, shard)

    def received_numel(self, full_numel: int) -> int:
        """Elements of scratch that a reduction of `full_numel` elements needs, 0 for none."""
        if not self.ordered:
            return 0
        return full_numel - full_numel // self.world.size if self._exchanges else full_numel

    @_announced("reduction", counts=False)
    def expect_reduce(self, received: torch.Tensor, tag: int, *, name: str) -> Exchange | None:
        """Be ready to receive what `reduce` will put into `received`, scratch of `received_numel` elements."""
        if not self._exchanges:
            return None
        return Exchange(_group(self.world.reduce_group), tag=tag, parts=self._received_parts(received, received[:0]))

    @_announced("reduction")
    def reduce(
        self,
        full: torch.Tensor,
        received: torch.Tensor | None,
        out: torch.Tensor,
        expected: Exchange | None,
        *,
        name: str,
    ) -> Pending:
        """Start the reduce-scatter of `full` (numel); once waited for, `finish_reduce` leaves the sum in `out`.

        Args:
            full: this rank's unreduced gradient; must stay as it is until finished.
            received: scratch of `received_numel` elements, for the ordered reduction only.
            out: this rank's shard (numel / ranks), of the same dtype as `full`. It may lie inside `full`.
            expected: what `expect_reduce` gave for `received`.
        """
        if self.world.size == 1:
            return Pending(())
        self.ledger.record("reduce", self._ring_nbytes(full) * self._reduce_passes)
        if expected is not None:
            return self._issued(expected.send(full.view(self.world.size, -1)), full, received)
        group = self.world.reduce_group
        if received is None:
            return self._issued([_reduce_scatter(out, full, group=group, async_op=True)], full, out)
        return self._issued([dist.all_to_all_single(received, full, group=group, async_op=True)], full, received)

    def _received_parts(self, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """One part for each rank, in rank order; `own` where an exchange leaves out this rank's own."""
        if not self._exchanges:
            return list(received.view(self.world.size, -1))
        parts = list(received.view(self.world.size - 1, -1))
        parts.insert(self.world.rank, own)
        return parts

    def finish_reduce(self, full: torch.Tensor, received: torch.Tensor | None, out: torch.Tensor) -> None:
        """A reduction was waited for: leave the sum over ranks in `out`, added in rank order in fp32 if ordered."""
        if received is None:
            return
        if self._is_gloo and not self._exchanges:
            out.copy_(_sum_of_rows(received.view(self.world.size, -1)))
            return
        parts = self._received_parts(received, full.view(self.world.size, -1)[self.world.rank])
        total = parts[0].to(torch.float32)
        # The sums on the way go over what was received: `out` may be one of the parts still to be added.
        on_the_way = received[: out.numel()] if received.dtype == torch.float32 else total
        for part in parts[1:-1]:
            total = torch.add(total, part, out=on_the_way)
        if out.dtype == torch.float32:
            torch.add(total, parts[-1], out=out)
        else:
            out.copy_(torch.add(total, parts[-1], out=on_the_way))

    @_announced("exchange")
    def exchange(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        sent_numels: list[int],
        received_numels: list[int],
        *,
        name: str,
    ) -> Pending:
        """All-to-all of parts that need not be equal: `sent` holds one for each rank, none for this one.

        Args:
            sent_numels, received_numels: elements of each rank's part, which may be 0.
        """
        self.ledger.record("exchange", sent.nbytes)
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        work = dist.all_to_all_single(
            received, sent, received_numels, sent_numels, group=self.world.reduce_group, async_op=True
        )
        return self._issued([work], sent, received)

    @_announced("comparison")
    def gather_small(self, values: torch.Tensor, *, name: str) -> torch.Tensor:
        """(n,) on each rank -> (ranks, n) on every rank, waited for."""
        if self.world.size == 1:
            return values.view(1, -1)
        everyone = values.new_empty(self.world.size, values.numel())
        self.ledger.record(name, self._ring_nbytes(everyone))
        _all_gather(everyone.view(-1), values.contiguous(), group=self.world.gather_group)
        return everyone

    @_announced("comparison")
    def gather_objects(self, value: Any, *, name: str) -> list[Any]:
        """What each rank has to say, in rank order, on every rank: small picklable values, outside of steps."""
        if self.world.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, value, group=self.world.gather_group)
        return everyone

    @_announced("broadcast")
    def broadcast(self, values: torch.Tensor, *, name: str) -> None:
        """Rank 0's values on every rank, waited for."""
        if self.world.size == 1:
            return
        self.ledger.record("broadcast", values.nbytes if self.world.rank == 0 else 0)
        dist.broadcast(values, group=self.world.gather_group, group_src=0)

    def _ring_nbytes(self, full: torch.Tensor) -> int:
        """Bytes one rank sends when each rank's part of `full` reaches (or comes from) every other rank."""
        return full.nbytes // self.world.size * (self.world.size - 1)

    def _issued(self, works: Sequence[dist.Work], *tensors: torch.Tensor | None) -> Pending:
        pending = Pending(works, *tensors)
        if not self.overlap:
            pending.wait()
        return pending


@functools.cache
def _code(name: str) -> int:
    return zlib.crc32(name.encode())


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """(ranks, n) on the CPU -> (n,) fp32: added row by row, within torch. A loop over 1,024 rows takes three times as
    long, and `sum` adds in an order of its own."""
    total = rows[:1].to(torch.float32, copy=True)
    for some in rows[1:].split(NUM_ROWS_WIDENED):
        total.index_add_(0, torch.zeros(len(some), dtype=torch.int64), some.to(torch.float32))
    return total[0]


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group
