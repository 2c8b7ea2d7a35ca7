"""The wire of real ranks: torch's process groups, and which way to send suits which backend.

| backend | gather | ordered reduction | native reduction |
|---|---|---|---|
| gloo, all ranks on one host | read from the others' memory | the same | the backend's own |
| gloo, hosts of 2, 4, 8, ... ranks | read inside a host, posted sends across | the same | the backend's own |
| gloo, few ranks | posted sends and receives | posted sends and receives | the backend's own |
| gloo, many ranks; NCCL | the backend's own | all-to-all, sum of rows | the backend's own |
"""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm.accounts.frames import gather_framed
from zerotrain.comm.ranks.hosts import host_name
from zerotrain.comm.ranks.world import Shards, backend_of, timeout_of
from zerotrain.comm.scratch import zeros_on
from zerotrain.comm.wire import Wire, gather_objects
from zerotrain.comm.wires.backend_handles import (
    AllToAll,
    NativeGather,
    NativeReduction,
    OrderedReduction,
    all_gather,
    unseen_by_profiler,
)
from zerotrain.comm.wires.memory.across_handles import AcrossGather, AcrossReduction
from zerotrain.comm.wires.memory.hosts import meet_hosts, ranks_of_host
from zerotrain.comm.wires.memory.local_peers import NotLocalError, require_all
from zerotrain.comm.wires.memory.local_ranks import LocalRanks
from zerotrain.comm.wires.memory.shared_handles import SharedGather, SharedReduction
from zerotrain.comm.wires.posted_handles import PostedGather, PostedReduction
from zerotrain.device.kinds import device_of

MAX_RANKS_OF_EXCHANGE = 8
"""Up to here gathers and ordered reductions on gloo are posted sends and receives. gloo's own all-gather receives into
a second buffer as large as the result and copies it over: measured 4 times the CPU time and twice the memory; and its
all-to-all posts a receive behind the send. Posted, each takes two calls a rank, though."""


_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's own timeout, for a group that does not tell its own."""


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
    small = partial(_gather_small, gathers, is_gloo)
    wire = Wire(
        gather=partial(NativeGather, group=gathers, is_gloo=is_gloo),
        reduction=partial(OrderedReduction, group=reductions, is_gloo=is_gloo),
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        exchange=partial(AllToAll, group=reductions, is_gloo=is_gloo),
        gather_small=partial(gather_framed, small) if is_gloo_on_cpu else small,
        broadcast=partial(_broadcast, gathers, is_gloo),
        store=_get_default_store,
        zeros=zeros_on(device),
    )
    if is_gloo and shards.size <= MAX_RANKS_OF_EXCHANGE:
        wire = replace(
            wire,
            gather=partial(PostedGather, group=gathers, tags=tags),
            reduction=partial(PostedReduction, group=reductions, tags=tags),
        )
    if is_gloo_on_cpu:
        wire = _reading_memory(wire, shards, gathers, reductions, device)
    return wire if ordered else replace(wire, reduction=partial(NativeReduction, group=reductions, is_gloo=is_gloo))


def _reading_memory(
    wire: Wire, shards: Shards, gathers: dist.ProcessGroup, reductions: dist.ProcessGroup, device: torch.device
) -> Wire:
    """A wire whose ranks read each other's memory: all of them, or those of a host; the same one where they cannot."""
    say, tags = partial(gather_objects, wire.gather_small, device), shards.tags
    try:
        # Asked of all ranks: one of them may be told otherwise.
        why = "" if shards.shared_memory else "it has shared_memory=False"
        names = [name for _, name in require_all(say, why, host_name())]
        ranks = ranks_of_host(names, shards.rank, MAX_RANKS_OF_EXCHANGE)
        local = LocalRanks(shards.rank, ranks, say, (timeout_of(gathers, device) or _DEFAULT_TIMEOUT).total_seconds())
        if local.size == shards.size:
            return replace(
                wire,
                gather=partial(SharedGather, ranks=local, numbers=tags),
                reduction=partial(SharedReduction, ranks=local, numbers=tags),
                zeros=local.memory.zeros,
            )
        hosts = meet_hosts(local, shards.size // local.size, say)
        return replace(
            wire,
            gather=partial(AcrossGather, hosts=hosts, group=gathers, tags=tags),
            reduction=partial(AcrossReduction, hosts=hosts, group=reductions, tags=tags),
            zeros=local.memory.zeros,
        )
    except NotLocalError as error:
        return replace(wire, not_shared=str(error) if shards.shared_memory else "")


def _gather_small(group: dist.ProcessGroup, is_gloo: bool, values: torch.Tensor, _: str = "") -> torch.Tensor:
    everyone = values.new_empty(group.size(), values.numel())
    with unseen_by_profiler(is_gloo):
        all_gather(everyone.view(-1), values.contiguous(), group=group)
    return everyone


def _broadcast(group: dist.ProcessGroup, is_gloo: bool, values: torch.Tensor, source: int) -> None:
    with unseen_by_profiler(is_gloo):
        dist.broadcast(values, group=group, group_src=source)
