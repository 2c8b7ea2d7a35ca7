"""Which rank owns each tensor that is updated whole, and which rank's shard holds which part of it. Integers only.

    bucket   |  qkv.weight                     |  proj.weight         |
    rank 0   [ ............................ )                              owns qkv.weight
    rank 1                                  [ ....................... )    owns proj.weight

Rank 1 sends the end of qkv.weight to rank 0, which updates it and sends that end back; proj.weight stays where it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from zerotrain.sharding.layout import BucketLayout


@dataclass(frozen=True)
class Fragment:
    """The part of one whole tensor that lies in one rank's shard."""

    slot: int
    """The tensor's index in its bucket."""
    rank: int
    """Owner of the shard."""
    owner: int
    """Which rank updates the tensor."""
    in_shard: slice
    """Elements from the start of the shard."""
    in_tensor: slice
    """Elements from the start of the tensor."""

    @property
    def numel(self) -> int:
        return self.in_tensor.stop - self.in_tensor.start

    @property
    def travels(self) -> bool:
        """Whether it lies on another rank than the one that updates it."""
        return self.rank != self.owner


def update_cost(shape: Sequence[int]) -> int:
    """Multiplications of one Newton-Schulz step on a matrix, the most expensive update of whole tensors; else elements.

    With s the shorter side of X and l the longer: X X^T takes s*s*l, its square s**3, and that times X s*s*l again.
    (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.)
    """
    numel = prod(shape)
    if len(shape) != 2:
        return numel
    return min(shape) * (2 * numel + min(shape) ** 2)


def assign_owners(shapes: Sequence[Sequence[Sequence[int]]], num_shards: int) -> list[list[int]]:
    """The owner of each whole tensor, by bucket: a function of the shapes alone, the same on every rank.

    Bucket by bucket, since they are updated one after the other, the most expensive tensor goes to the rank with least
    to do so far.

    Args:
        shapes: for each bucket the shapes of its whole tensors.
    """
    load = [0] * num_shards
    owners: list[list[int]] = []
    for bucket in shapes:
        owners.append([0] * len(bucket))
        for index in sorted(range(len(bucket)), key=lambda index: -update_cost(bucket[index])):
            owner = load.index(min(load))
            load[owner] += update_cost(bucket[index])
            owners[-1][index] = owner
    return owners


def cut_fragments(layout: BucketLayout, slot_index: int, owner: int) -> Iterator[Fragment]:
    """The fragments of one tensor in rank order, without padding."""
    slot = layout.slots[slot_index]
    for rank in range(layout.num_shards):
        shard = layout.shard(rank)
        start, end = max(slot.offset, shard.start), min(slot.end, shard.stop)
        if start < end:
            in_shard = slice(start - shard.start, end - shard.start)
            yield Fragment(slot_index, rank, owner, in_shard, slice(start - slot.offset, end - slot.offset))
