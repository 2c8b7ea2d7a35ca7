"""Handles on torch.distributed's own collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd import profiler

from zerotrain.comm.handles import Exchange, Gather, Handle, HandleSpec, Reduction, ReductionSpec
from zerotrain.device.device import lies_on_host

# The mean over leaves, added by one tree whatever the ranks: the bits to measure everything else against.


CHUNK_NUMEL = 2**18
"""Elements averaged at a time on a CPU, where what is added and the sum (1 MiB each in fp32) stay in the cache:
measured in bf16, 3.2 million elements of two ranks took 14 ms at once and 2 ms in chunks."""


def mean_by_tree(parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor, num_leaves: int) -> None:
    """Leave the mean of `num_leaves` leaves in `out` (n). `parts`, (ranks, n) or one tensor for each rank, are sums of
    equally many leaves each.

    Neighbours are added in pairs in fp32, then the sums in pairs, and so on; the last of an odd number goes up as it
    is. The sum is divided by the number of leaves, then rounded to the dtype of `out`; `out` may be one of the parts.
    """
    pairs = (len(parts) + 1) // 2
    step = max(1, CHUNK_NUMEL // pairs) if lies_on_host(out) else out.numel()
    sums = torch.empty(pairs, min(step, out.numel()), dtype=torch.float32, device=out.device)
    for start in range(0, out.numel(), step):
        where = slice(start, start + step)
        mean = out[where]
        into = sums[:, : mean.numel()]
        if isinstance(parts, torch.Tensor):
            total = _sum_of_rows(parts[:, where], into)
        else:
            # The last sum may go where the mean does: that may be one of the parts, but no other sum needs it.
            total = _sum([part[where] for part in parts], into, mean if mean.dtype == into.dtype else into[0])
        if num_leaves & (num_leaves - 1) == 0:
            total.mul_(1 / num_leaves)  # the same bits, since the factor is exact, in a third of the time
        else:
            total.div_(num_leaves)
        if total is not mean:
            mean.copy_(total)


def _sum(parts: Sequence[torch.Tensor], into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(n,) fp32 in `out`: the tree's sum of some parts, added in `into`, (pairs, n)."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    while len(parts) > 2:
        paired = [_add(a, b, total) for a, b, total in zip(parts[::2], parts[1::2], into, strict=False)]
        parts = [*paired, parts[-1]] if len(parts) % 2 else paired
    return _add(parts[0], parts[1], out)


def _sum_of_rows(rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The same of (ranks, n), without a call for each of a thousand ranks."""
    num_pairs = len(rows) // 2
    _add(rows[: 2 * num_pairs : 2], rows[1 : 2 * num_pairs : 2], into[:num_pairs])
    into[num_pairs:].copy_(rows[2 * num_pairs :])  # of an odd number the last
    while (num_pairs := len(into) // 2) > 0:
        into[: 2 * num_pairs : 2].add_(into[1 : 2 * num_pairs : 2])
        into = into[::2]
    return into[0]


def _add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """In fp32. `torch.add` of two tensors of 16 bits adds in 16 bits, whatever it is to leave the sum in."""
    if a.dtype == b.dtype != total.dtype:
        return total.copy_(a).add_(b)
    return torch.add(a, b, out=total)


# torch 2.13 renames these two and warns about the old names; torch 2.11 has only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works(Handle):
    """A handle on works of torch.distributed, in one group."""

    _works: Sequence[dist.Work | None] = ()

    def __init__(self, spec: HandleSpec, group: dist.ProcessGroup, is_gloo: bool = True) -> None:
        super().__init__(spec)
        self._group, self._is_gloo = group, is_gloo

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:  # None is for processes outside the group
                work.wait()
        self._works = ()

    def _is_done(self) -> bool:
        return _are_completed(self._works)

    def _is_over(self) -> Callable[[], bool]:
        return partial(_are_completed, self._works)


def _are_completed(works: Sequence[dist.Work | None]) -> bool:
    return all(work is None or work.is_completed() for work in works)


class NativeGather(Works, Gather):
    """The backend's own all-gather."""

    def _issue(self) -> None:
        with unseen_by_profiler(self._is_gloo):
            self._works = [all_gather(self.full, self.shard, group=self._group, async_op=True)]


class NativeReduction(Works, Reduction):
    """The backend's own reduce-scatter. It adds in an order of its own."""

    def __init__(self, spec: ReductionSpec, group: dist.ProcessGroup, is_gloo: bool) -> None:
        super().__init__(spec, group, is_gloo)
        # gloo has no mean of its own.
        self._operation = dist.ReduceOp.SUM if self._is_gloo else dist.ReduceOp.AVG
        self._divisor = self.num_leaves if self._is_gloo else self.num_leaves // self._group.size()
        if self._is_gloo:  # which builds its reduce-scatter from a whole all-reduce, and sends every byte twice
            self.sent_nbytes *= 2

    def _issue(self) -> None:
        result = self.out if self._pool.dtype == self.out.dtype else self._borrow(1)[0]
        with unseen_by_profiler(self._is_gloo):
            work = reduce_scatter(result, self._full, op=self._operation, group=self._group, async_op=True)
        self._works = [work]

    def _complete(self) -> None:
        if self._received is not None:
            mean_by_tree(self._received_parts(1), self.out, self._divisor)
            self._give_back()
        elif self._divisor > 1:
            self.out.div_(self._divisor)
        super()._complete()


class OrderedReduction(Works, Reduction):
    """An all-to-all of the parts, then their mean, added by a tree in fp32."""

    def _issue(self) -> None:
        received = self._borrow(self._group.size()).view(-1)  # this rank's own part included
        with unseen_by_profiler(self._is_gloo):
            self._works = [dist.all_to_all_single(received, self._full, group=self._group, async_op=True)]

    def _complete(self) -> None:
        mean_by_tree(self._received_parts(self._group.size()), self.out, self.num_leaves)
        self._give_back()
        super()._complete()


class AllToAll(Works, Exchange):
    """torch's all-to-all of parts of any size."""

    def _issue(self) -> None:
        spec = self._spec
        with unseen_by_profiler(self._is_gloo):
            work = dist.all_to_all_single(
                spec.received, spec.sent, spec.received_numels, spec.sent_numels, group=self._group, async_op=True
            )
        self._works = [work]


@contextmanager
def unseen_by_profiler(is_gloo: bool) -> Iterator[None]:
    """Keep gloo's own ranges out of a profile while it is taken.

    torch ends them when the collective does, and if the profiler has stopped by then, writes into freed memory: 9 of 9
    runs with train.profile=true at stage 2 died of SIGSEGV at their end (torch 2.13).
    """
    is_seen = not is_gloo or not profiler._is_profiler_enabled
    if is_seen:
        yield
        return
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


# Handles made of sends and receives on gloo: the receives are posted ahead.


class _Posted(Works):
    """One part from every rank to every other: the receives are posted by `prepare`, the sends by `issue`.

    gloo sends a part once its receiver has said "ready", and the word travels behind whatever the receiver is sending
    itself. Posted ahead, no word is late, and both directions of a link are busy at once: on a link
    of 1 Gbit/s an exchange whose receives come behind its sends takes twice the time.

    A tag keeps apart what is under way at the same time: parts of different buckets that met would end the process
    where their sizes differ, and give wrong weights where not.
    """

    def __init__(self, spec: HandleSpec, group: dist.ProcessGroup, tags: Iterator[int]) -> None:
        super().__init__(spec, group)
        self._tag = next(tags)
        self._rank, self._size = group.rank(), group.size()
        # Beginning behind this rank, so that not all begin with the same.
        self._peers = [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def _post(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Receive into part r what comes from rank r."""
        with unseen_by_profiler(self._is_gloo):
            # Not dist.irecv and dist.isend: they make 9 more Python calls for each peer.
            self._works = [self._group.recv([parts[peer]], peer, self._tag) for peer in self._peers]

    def _end_receives(self, values: torch.Tensor) -> None:
        """Send `values` to every rank, for nobody to read: only a message ends a posted receive."""
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
    """Every part goes to its rank. The rank takes their mean, added by a tree in fp32."""

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
