"""Which parts of a bucket a rank updates as one tensor each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan


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
    layout: BucketLayout, runs: Sequence[tuple[int, tuple[int, int] | None]], where: slice, master_weight: torch.Tensor
) -> list[Span]:
    """The spans that a rank updates by elements within `where`: neighbours of one group and generation together.

    Args:
        runs: of the bucket's spec.
    """
    places = layout.spans([index for index, _ in runs], where)
    return [
        Span(place, master_weight[place].detach(), key)
        for (_, key), place in zip(runs, places, strict=True)
        if place.stop > place.start and key is not None
    ]
