"""Which parts of a bucket a rank updates as one tensor each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan
from zerotrain.sharding.units import ManagedParameter


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that one rank updates as one tensor: parameters of one group and generation."""

    where: slice
    """Within this rank's range of the update."""
    target: torch.Tensor
    """The master weight there."""
    key: tuple[int, int]
    """`ManagedParameter.span` of its parameters."""


def update_range(layout: BucketLayout, plan: Plan, rank: int) -> slice:
    """The elements of a bucket that a rank updates: its own shard, or all."""
    return layout.shard(rank) if plan.shards_optimizer else slice(0, layout.padded_numel)


def cut_spans(
    layout: BucketLayout, members: Sequence[ManagedParameter], where: slice, master_weight: torch.Tensor
) -> list[Span]:
    """What a rank that updates `where` updates by elements: neighbours of one group and generation together."""
    keys = [(managed.is_updated_whole, managed.span) for managed in members]
    borders = [index for index, key in enumerate(keys) if index == 0 or key != keys[index - 1]]
    return [
        Span(place, master_weight[place].detach(), members[border].span)
        for border, place in zip(borders, layout.spans(borders, where), strict=True)
        if place.stop > place.start and not members[border].is_updated_whole
    ]
