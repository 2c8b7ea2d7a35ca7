"""The place of each parameter in its bucket, and each rank's range of the bucket. Integers only.

    offset   0                    128       192                    320        384
             |  wte.weight (100)  | pad 28  |  ln.weight (64)  ... | padding  |
    rank 0   [ 0 ........................ 192 )
    rank 1                                 [ 192 ..................... 384 )

Parameters may be sharded over `shard_size` neighbours alone, with a replica of them on each further such group. Ranks
with the same part of the parameters update neighbouring ranges of it, so a part stays one range:

    4 ranks, shard_size 2     |  part of ranks 0 and 2      |  part of ranks 1 and 3      |
    updated by                |  rank 0      |  rank 2      |  rank 1      |  rank 3      |

Every parameter and every rank's range starts on a multiple of `ALIGN_NUMEL` elements. That gives each
shard 128-byte aligned borders in 16-bit types (a NCCL ring is 12 times slower when pointers are not 16-byte
aligned), gives each weight the alignment of a tensor of its own (matrix kernels choose by alignment, and their bits
with it), and makes every block of 64 elements of a parameter lie within one shard at any bucket size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

ALIGN_NUMEL = 64
"""Elements between possible starts: 128 bytes of a 16-bit type, 256 of fp32."""


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of `multiple`, at least `numel`."""
    return -(-numel // multiple) * multiple


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next in each dimension of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a bucket."""

    shape: tuple[int, ...]
    offset: int
    """Elements from the start of the bucket."""
    stride: tuple[int, ...]
    """The parameter's stride, dense: a transposed or channels-last one stays so; kernels choose their path by it."""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def end(self) -> int:
        """One past the last element, without padding."""
        return self.offset + self.numel


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """The integers of one bucket over `num_shards` ranks, of which `shard_size` hold sharded parameters once."""

    slots: tuple[Slot, ...]
    padded_numel: int
    """Elements with padding: a multiple of num_shards * ALIGN_NUMEL."""
    num_shards: int
    shard_size: int

    @classmethod
    def pack(
        cls,
        shapes: Sequence[tuple[int, ...]],
        num_shards: int,
        strides: Sequence[tuple[int, ...]] | None = None,
        *,
        shard_size: int | None = None,
    ) -> "BucketLayout":
        """Lay parameters one behind the other, each on an aligned offset.

        Args:
            strides: one for each shape, without gaps or overlap; None: contiguous ones.
            shard_size: a divisor of `num_shards`; None: all.
        """
        strides = strides or [contiguous_stride(shape) for shape in shapes]
        slots, offset = [], 0
        for shape, stride in zip(shapes, strides, strict=True):
            slots.append(Slot(tuple(shape), offset, tuple(stride)))
            offset = round_up(slots[-1].end, ALIGN_NUMEL)
        padded_numel = round_up(max(offset, 1), ALIGN_NUMEL * num_shards)
        return cls(tuple(slots), padded_numel, num_shards, shard_size or num_shards)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def is_dense(self) -> bool:
        """Whether slots follow each other without gaps (padding behind the last aside)."""
        return all(slot.end == next_slot.offset for slot, next_slot in pairwise(self.slots))

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's range, with padding; the same for all ranks."""
        return self.padded_numel // self.num_shards

    def shard(self, rank: int) -> slice:
        """The range of one rank."""
        place = rank % self.shard_size * (self.num_shards // self.shard_size) + rank // self.shard_size
        return slice(place * self.shard_numel, (place + 1) * self.shard_numel)

    def part(self, rank: int) -> slice:
        """The parameters of one rank where they are sharded: its range, and those of its replicas."""
        numel, place = self.padded_numel // self.shard_size, rank % self.shard_size
        return slice(place * numel, (place + 1) * numel)

    def spans(self, borders: Sequence[int], within: slice) -> list[slice]:
        """Cut `within` at slot borders: span i reaches from slot `borders[i]` to the next border (or the end).

        Returns:
            One slice each, relative to the start of `within`, empty where a span lies outside it. Starts and ends
            are multiples of ALIGN_NUMEL (padding goes with the slot before it), so that a vectorised kernel
            never meets a remainder, whose rounding can differ from its body's.
        """
        starts = [self.slots[index].offset for index in borders]
        ends = [*starts[1:], self.padded_numel]
        clipped = [(max(start, within.start), min(end, within.stop)) for start, end in zip(starts, ends, strict=True)]
        return [slice(start - within.start, max(start, end) - within.start) for start, end in clipped]


# One flat tensor holds the parameters of a bucket end to end. Its memory can be given back.


def slot_view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The part of a bucket's flat tensor in `slot`, with its parameter's shape and strides."""
    return flat[slot.offset : slot.end].as_strided(slot.shape, slot.stride)


class FlatBuffer:
    """A tensor of (layout.padded_numel,).

    Parameters of the model are views of it: what a collective writes is what the model reads, without a copy.
    `release` frees the memory and keeps the tensor, its views and all that autograd saved of them; `allocate`
    brings memory back under the same views.
    """

    def __init__(self, layout: BucketLayout, tensor: torch.Tensor) -> None:
        self.layout = layout
        self.tensor = tensor

    @classmethod
    def zeros(cls, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> "FlatBuffer":
        """Zeroed memory of its own."""
        return cls(layout, torch.zeros(layout.padded_numel, dtype=dtype, device=device))

    def views(self) -> list[torch.Tensor]:
        """The slots in order, each with its parameter's shape and strides."""
        return [slot_view(self.tensor, slot) for slot in self.layout.slots]

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory held now: all or none."""
        return self.tensor.untyped_storage().nbytes()

    def copy(self) -> "FlatBuffer":
        """The same values in memory of their own."""
        return FlatBuffer(self.layout, self.tensor.clone())

    def allocate(self) -> None:
        """Hold memory (uninitialised) if there is none."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.tensor.nbytes)

    def release(self) -> None:
        """Give the memory back."""
        self.tensor.untyped_storage().resize_(0)


# The owner of each tensor to update whole, and the shards with its parts. Integers only.
#
#     bucket   |  qkv.weight                     |  proj.weight         |
#     rank 0   [ ............................ )                              owns qkv.weight
#     rank 1                                  [ ....................... )    owns proj.weight
#
# Rank 1 sends the end of qkv.weight to rank 0, which updates it and sends that end back; proj.weight stays where it
# is.


@dataclass(frozen=True)
class Fragment:
    """The part of one whole tensor in one rank's shard."""

    slot: int
    """The tensor's index in its bucket."""
    rank: int
    """Owner of the shard."""
    owner: int
    """The updating rank of the tensor."""
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
