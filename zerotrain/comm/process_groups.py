"""The wire of real ranks: torch's process groups, and which way to send suits which backend.

| backend | gather | ordered reduction | native reduction |
|---|---|---|---|
| gloo, few ranks | posted sends and receives | posted sends and receives | the backend's own |
| gloo, many ranks; NCCL | the backend's own | all-to-all, sum of rows | the backend's own |
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm.accounts.frames import gather_framed
from zerotrain.comm.ranks.world import Shards, backend_of
from zerotrain.comm.wire import Wire
from zerotrain.comm.wires.backend_handles import (
    AllToAll,
    NativeGather,
    NativeReduction,
    OrderedReduction,
    all_gather,
    unseen_by_profiler,
)
from zerotrain.comm.wires.posted_handles import PostedGather, PostedReduction
from zerotrain.device.kinds import device_of

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
    small = partial(_gather_small, gathers, is_gloo)
    wire = Wire(
        gather=partial(NativeGather, group=gathers, is_gloo=is_gloo),
        reduction=partial(OrderedReduction, group=reductions, is_gloo=is_gloo),
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        exchange=partial(AllToAll, group=reductions, is_gloo=is_gloo),
        gather_small=partial(gather_framed, small) if is_gloo_on_cpu else small,
        broadcast=partial(_broadcast, gathers, is_gloo),
        store=_get_default_store,
    )
    if is_gloo and shards.size <= MAX_RANKS_OF_EXCHANGE:
        wire = replace(
            wire,
            gather=partial(PostedGather, group=gathers, tags=tags),
            reduction=partial(PostedReduction, group=reductions, tags=tags),
        )
    return wire if ordered else replace(wire, reduction=partial(NativeReduction, group=reductions, is_gloo=is_gloo))


def _gather_small(group: dist.ProcessGroup, is_gloo: bool, values: torch.Tensor, _: str = "") -> torch.Tensor:
    everyone = values.new_empty(group.size(), values.numel())
    with unseen_by_profiler(is_gloo):
        all_gather(everyone.view(-1), values.contiguous(), group=group)
    return everyone


def _broadcast(group: dist.ProcessGroup, is_gloo: bool, values: torch.Tensor, source: int) -> None:
    with unseen_by_profiler(is_gloo):
        dist.broadcast(values, group=group, group_src=source)
