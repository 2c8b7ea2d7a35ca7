"""The collectives of one engine: handles on gathers and reductions, and a few small ones, waited for at once."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm import handles, wires
from zerotrain.comm.handles import (
    Exchange,
    ExchangeSpec,
    Gather,
    GatherSpec,
    Reduction,
    ReductionSpec,
    ScratchPool,
    Wire,
)
from zerotrain.comm.hosts import host_name
from zerotrain.comm.ledger import ACROSS, Journal, Ledger, Notes, OtherNamesError, gather_framed
from zerotrain.comm.whereabouts import by_rank
from zerotrain.comm.world import Shards, World, backend_of
from zerotrain.device.kinds import device_of
from zerotrain.errors import DisagreementError

# The wire of real ranks: torch's process groups, and the way to send for each backend.
#
# | backend                | gather                   | ordered reduction        | native reduction  |
# |------------------------|--------------------------|--------------------------|-------------------|
# | gloo, few ranks        | posted sends, receives   | posted sends, receives   | the backend's own |
# | gloo, many ranks; NCCL | the backend's own        | all-to-all, sum of rows  | the backend's own |


MAX_RANKS_OF_EXCHANGE = 8
"""Up to here gathers and ordered reductions on gloo are posted sends and receives. gloo's own all-gather receives into
a second buffer as large as the result and copies it over: measured 4 times the CPU time and twice the memory; and its
all-to-all posts a receive behind the send. Posted, each takes two calls a rank, though."""


def process_groups(shards: Shards, device: torch.device, *, ordered: bool) -> Wire:
    """The wire of the two groups of some `Shards`: gathers and small collectives in one, reductions in the other.

    Args:
        device: where the tensors are; a group may have a backend for each kind of device.
        ordered: reduce by adding along one tree in fp32, whose bits do not depend on where a bucket's borders lie;
            otherwise by the backend's own reduce-scatter.
    """
    gathers, reductions, tags = shards.gather_group, shards.reduce_group, shards.tags
    assert gathers is not None
    assert reductions is not None
    is_gloo = backend_of(gathers, device) == "gloo"
    if not device_of(device).is_host:  # opened now: the first use may come in a backward, while gathers are under way
        for group in (gathers, reductions):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    # Not on a GPU, where gloo may be too, nor in torch's fake group.
    is_gloo_on_cpu = device_of(device).is_host and gathers._get_backend(device).name().lower() == "gloo"

    def gather_small(values: torch.Tensor, _: str = "") -> torch.Tensor:
        everyone = values.new_empty(gathers.size(), values.numel())
        with wires.unseen_by_profiler(is_gloo):
            wires.all_gather(everyone.view(-1), values.contiguous(), group=gathers)
        return everyone

    def broadcast(values: torch.Tensor, source: int) -> None:
        with wires.unseen_by_profiler(is_gloo):
            dist.broadcast(values, group=gathers, group_src=source)

    gather: Callable[[GatherSpec], Gather] = partial(wires.NativeGather, group=gathers, is_gloo=is_gloo)
    reduction: Callable[[ReductionSpec], Reduction]
    reduction = partial(wires.OrderedReduction, group=reductions, is_gloo=is_gloo)
    if is_gloo and shards.size <= MAX_RANKS_OF_EXCHANGE:
        gather = partial(wires.PostedGather, group=gathers, tags=tags)
        reduction = partial(wires.PostedReduction, group=reductions, tags=tags)
    if not ordered:
        reduction = partial(wires.NativeReduction, group=reductions, is_gloo=is_gloo)
    return Wire(
        gather=gather,
        reduction=reduction,
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        exchange=partial(wires.AllToAll, group=reductions, is_gloo=is_gloo),
        gather_small=partial(gather_framed, gather_small) if is_gloo_on_cpu else gather_small,
        broadcast=broadcast,
        store=_get_default_store,
    )


T = TypeVar("T")


class Collectives:
    """The collectives of an engine over the shards of a `World`. Each collective has a `name`, the same on every rank.

    Handles are made in the same order on every rank. On a mesh of shards x replicas a gather goes across and then
    inside, a reduction inside and then across: inside are neighbours, so a rank has the root of a whole subtree to send
    across, and the bits are those of one axis.

    Args:
        ledger: counts calls and bytes.
        ordered: reduce by adding along one tree in fp32, whose bits do not depend on where a bucket's borders lie;
            otherwise by the backend's own reduce-scatter.
        overlap: False waits for each collective as soon as it is issued.
    """

    def __init__(self, world: World, *, ledger: Ledger, ordered: bool, overlap: bool) -> None:
        self.world = world
        self.shards = world.shards
        self.ledger = ledger
        self.journal = Journal(ledger, world.whereabouts, overlap=overlap, overdue=world.overdue)
        """The record of all collectives of this engine."""
        self._ordered = ordered
        self._wire = self._inside = self._wire_of(world.shards)
        self._across = _wire_of_one_rank()
        self.inside, self.across = world.shards, Shards()
        """The ranks that hold sharded parameters once, and the replicas of this one; see `split`."""
        self.zeros = self._wire.zeros or partial(torch.zeros, device=world.device)
        """(numel, dtype=dtype) -> (numel,) zeros for a part of a step; see `Wire.zeros`."""

    def _wire_of(self, shards: Shards) -> Wire:
        with self.world.whereabouts.blame_others("comparison of where ranks are"):
            if shards.make_wire is not None:
                return shards.make_wire(self._ordered)
            if shards.size == 1:
                return _wire_of_one_rank()
            return process_groups(shards, self.world.device, ordered=self._ordered)

    def split(self, shard_size: int) -> None:
        """Make a mesh of the ranks, before any handle. Collective.

        Args:
            shard_size: ranks that hold sharded parameters once; a power of two that divides all.
        """
        if shard_size < self.shards.size:
            with self.world.whereabouts.blame_others("making of the groups of a mesh"):
                self.inside, self.across = self.shards.axes(shard_size, self.world.device)
            self._inside, self._across = self._wire_of(self.inside), self._wire_of(self.across)

    def ranks_of_hosts(self) -> list[int]:
        """The number of the host that each rank is on, by rank. Collective."""
        hosts = self.gather_objects(host_name(), name="hosts")
        return [hosts.index(host) for host in hosts]

    def gather(self, name: str, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        """A handle on the all-gather of every rank's `shard` into `full`."""
        if self.across.size == 1:
            return self.gather_inside(name, full, shard)
        part = full.view(self.inside.size, -1)[self.inside.rank]
        first, second = self.gather_across(name, part, shard), self.gather_inside(name, full, part)
        return handles.RelayedGather(GatherSpec(name, self.journal, full, shard), first, second)

    def gather_inside(self, name: str, full: torch.Tensor, part: torch.Tensor) -> Gather:
        """A handle on the gather of the parts inside; all there is to send without replicas."""
        return self._inside.gather(GatherSpec(name, self.journal, full, part))

    def gather_across(self, name: str, part: torch.Tensor, shard: torch.Tensor) -> Gather:
        """A handle on the gather of the shards of this rank's part from its replicas."""
        gather = self._across.gather(GatherSpec(name + ACROSS, self.journal, part, shard))
        gather.ledger_kind += ACROSS
        return gather

    def gather_now(self, name: str, full: torch.Tensor, shard: torch.Tensor) -> None:
        """The same once, waited for."""
        gather = self.gather(name, full, shard)
        gather.issue()
        gather.finish()
        self._settle()

    def reduction(
        self, name: str, out: torch.Tensor, pool: ScratchPool, sums: ScratchPool | None = None, leaves_per_rank: int = 1
    ) -> Reduction:
        """A handle on the mean over all leaves; `out` gets this rank's shard. It is sent in the dtype of `pool`, and
        across in that of `sums`, if reductions are ordered."""
        num_inside, num_across = self.inside.size, self.across.size
        num_leaves = leaves_per_rank * self.shards.size
        spec = ReductionSpec(name, self.journal, out, pool, num_inside, num_leaves)
        if num_across == 1:
            return self._inside.reduction(spec)
        # Ordered, the sum is divided once, as along one axis; the backend's own reduction gives a mean of each axis.
        leaves_inside, leaves_across = (1, num_leaves) if self._ordered else (num_leaves // num_across, num_across)
        sums = sums if sums is not None and self._ordered else pool
        own = out.new_empty((), dtype=sums.dtype).expand(num_across * out.numel())  # takes its place until there is one
        first = self._inside.reduction(replace(spec, out=own, num_leaves=leaves_inside))
        to_mean = replace(spec, name=name + ACROSS, pool=sums, num_ranks=num_across, num_leaves=leaves_across)
        second = self._across.reduction(to_mean)
        second.ledger_kind += ACROSS
        start = self.inside.rank * own.numel()
        return handles.RelayedReduction(replace(spec, pool=sums), first, second, slice(start, start + own.numel()))

    def exchange(
        self, name: str, sent: torch.Tensor, received: torch.Tensor, sent_numels: list[int], received_numels: list[int]
    ) -> Exchange:
        """Issue an all-to-all: `sent` and `received` hold one part for each rank, of so many elements, none for this
        one."""
        exchange = self._wire.exchange(ExchangeSpec(name, self.journal, sent, received, sent_numels, received_numels))
        if self.across.size > 1:
            start = self.shards.rank - self.inside.rank
            nbytes_inside = sum(sent_numels[start : start + self.inside.size]) * sent.itemsize
            self._record(exchange.ledger_kind + ACROSS, exchange.sent_nbytes - nbytes_inside)
            exchange.sent_nbytes = nbytes_inside
        exchange.issue()
        return exchange

    def gather_small(self, values: torch.Tensor, *, name: str, in_order: bool = True) -> torch.Tensor:
        """(n,) on each rank -> (ranks, n) on every rank, waited for.

        Args:
            in_order: whether it has a place in the order of collectives, which a call that is refused must not have.

        Raises:
            DisagreementError: on every rank, which have come with different names. None of them has done anything.
        """
        self._record(name, values.nbytes * (self.shards.size - 1))
        return self._together("comparison", name, partial(self._wire.gather_small, values, name), in_order)

    def gather_objects(self, value: Any, *, name: str, in_order: bool = True) -> list[Any]:
        """The values of all ranks, in rank order, on every rank: small ones, outside of steps. Otherwise as
        `gather_small`."""
        say = partial(handles.gather_objects, self._wire.gather_small, self.world.device, value, name)
        return self._together("comparison", name, say if self.shards.size > 1 else lambda: [value], in_order)

    def broadcast(self, values: torch.Tensor, *, name: str, source: int = 0) -> None:
        """One rank's values on every rank, waited for."""
        self._record("broadcast", values.nbytes if self.shards.rank == source else 0)
        self._together("broadcast", name, partial(self._wire.broadcast, values, source))
        self._settle()

    def notes(self, subject: str) -> Notes:
        """For what goes on beside the training, on other threads; not collective."""
        return Notes(self._wire.store(), subject)

    def _settle(self) -> None:
        """Let the host wait for the device. On NCCL a collective's time counts from its issue: ranks that issue those
        of all buckets, while one copies and hashes each, would wait for it longer than `timeout_s`."""
        if self.shards.size > 1:
            device_of(self.world.device).event().settle()

    def _record(self, ledger_kind: str, sent_nbytes: int) -> None:
        if self.shards.size > 1:
            self.ledger.record(ledger_kind, sent_nbytes)

    def _together(self, kind: str, name: str, call: Callable[[], T], in_order: bool = True) -> T:
        started_s = time.monotonic()
        try:
            with self.world.watching(f"{kind} of {name}"):
                result = call()
        except OtherNamesError as error:
            raise DisagreementError(
                f"rank {self.world.rank}, {self.world.whereabouts.describe()}: the ranks have come to different calls: "
                f"{by_rank(error.names)}; all ranks must make the same calls in the same order"
            ) from None
        self.ledger.waited(time.monotonic() - started_s)
        if in_order:  # only now: of what ranks have not come to together none is made
            self.journal.note(kind, name)
        return result


def _wire_of_one_rank() -> Wire:
    """A gather or a reduction is a copy, or nothing where the result lies there already."""

    def exchange(spec: ExchangeSpec) -> Exchange:
        raise ValueError(f"an exchange of {spec.name} between one rank; this is a fault of zerotrain itself")

    return Wire(
        gather=_CopiedGather,
        reduction=_CopiedReduction,
        exchange=exchange,
        gather_small=lambda values, _: values.view(1, -1),
        broadcast=lambda _values, _source: None,
        store=dist.HashStore,
    )


class _CopiedGather(Gather):
    is_local = True

    def _issue(self) -> None:
        if self.full.data_ptr() != self.shard.data_ptr():
            self.full.copy_(self.shard)


class _CopiedReduction(Reduction):
    is_local = True

    def _issue(self) -> None:
        assert self._full is not None
        if self.num_leaves > 1:
            wires.mean_by_tree([self._full], self.out, self.num_leaves)
        elif self.out.data_ptr() != self._full.data_ptr():
            self.out.copy_(self._full)
