"""Handles on torch.distributed's own collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd import profiler

from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, GatherSpec, Handle, Reduction, ReductionSpec
from zerotrain.comm.means import mean_by_tree

# torch 2.13 renames these two and warns about the old names; torch 2.11 has only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works(Handle):
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
        return _are_completed(self._works)

    def _is_over(self) -> Callable[[], bool]:
        return partial(_are_completed, self._works)


def _are_completed(works: Sequence[dist.Work | None]) -> bool:
    return all(work is None or work.is_completed() for work in works)


class NativeGather(Works, Gather):
    """The backend's own all-gather."""

    def __init__(self, spec: GatherSpec, group: dist.ProcessGroup, is_gloo: bool) -> None:
        super().__init__(spec)
        self._group, self._is_gloo = group, is_gloo
        self.sent_nbytes = ring_nbytes(spec.full, group.size())

    def _issue(self) -> None:
        with unseen_by_profiler(self._is_gloo):
            self._works = [all_gather(self.full, self.shard, group=self._group, async_op=True)]


class _BackendReduction(Works, Reduction):
    """A reduction by one of the backend's own collectives."""

    def __init__(self, spec: ReductionSpec, group: dist.ProcessGroup, is_gloo: bool) -> None:
        super().__init__(spec)
        self._group, self._is_gloo = group, is_gloo
        self.sent_nbytes = self._part_nbytes * (group.size() - 1)


class NativeReduction(_BackendReduction):
    """The backend's own reduce-scatter, which adds in an order of its own."""

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


class OrderedReduction(_BackendReduction):
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

    def __init__(self, spec: ExchangeSpec, group: dist.ProcessGroup, is_gloo: bool) -> None:
        super().__init__(spec.name, spec.journal)
        self._spec, self._group, self._is_gloo = spec, group, is_gloo
        self.sent_nbytes = spec.sent.nbytes

    def _issue(self) -> None:
        spec = self._spec
        with unseen_by_profiler(self._is_gloo):
            work = dist.all_to_all_single(
                spec.received, spec.sent, spec.received_numels, spec.sent_numels, group=self._group, async_op=True
            )
        self._works = [work]


_ANYWAY: AbstractContextManager[None] = nullcontext()


def unseen_by_profiler(is_gloo: bool) -> AbstractContextManager[None]:
    """Keep gloo's own ranges out of a profile that is being taken.

    torch ends them when the collective does, and if the profiler has stopped by then, writes into memory that was
    freed: 9 of 9 runs with train.profile=true at stage 2 died of SIGSEGV at their end (torch 2.13).
    """
    return _no_ranges() if is_gloo and profiler._is_profiler_enabled else _ANYWAY


@contextmanager
def _no_ranges() -> Iterator[None]:
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def ring_nbytes(full: torch.Tensor, num_ranks: int) -> int:
    """Bytes one rank sends when each rank's part of `full` reaches every other rank."""
    return full.nbytes // num_ranks * (num_ranks - 1)
