"""The place of each parameter in its bucket, and the range of the bucket that each rank owns. Integers only.

    offset   0                    128       192                    320        384
             |  wte.weight (100)  | pad 28  |  ln.weight (64)  ... | padding  |
    rank 0   [ 0 ........................ 192 )
    rank 1                                 [ 192 ..................... 384 )

Every parameter and every rank's range starts on a multiple of `ALIGN_NUMEL` elements. That gives each
shard 128-byte aligned borders in 16-bit types (a NCCL ring is 12 times slower when pointers are not 16-byte
aligned), gives each weight the alignment of a tensor of its own (matrix kernels choose by alignment, and their bits
with it), and makes every block of 64 elements of a parameter lie within one shard at any bucket size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGN_NUMEL = 64
"""Elements between possible starts: 128 bytes of a 16-bit type, 256 of fp32."""


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `numel`."""
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
    """The integers of one bucket over `num_shards` ranks."""

    slots: tuple[Slot, ...]
    padded_numel: int
    """Elements with padding: a multiple of num_shards * ALIGN_NUMEL."""
    num_shards: int

    @classmethod
    def pack(
        cls, shapes: Sequence[tuple[int, ...]], num_shards: int, strides: Sequence[tuple[int, ...]] | None = None
    ) -> "BucketLayout":
        """Lay parameters one behind the other, each on an aligned offset.

        Args:
            strides: one for each shape, without gaps or overlap; None: contiguous ones.
        """
        strides = strides or [contiguous_stride(shape) for shape in shapes]
        slots, offset = [], 0
        for shape, stride in zip(shapes, strides, strict=True):
            slots.append(Slot(tuple(shape), offset, tuple(stride)))
            offset = round_up(slots[-1].end, ALIGN_NUMEL)
        return cls(tuple(slots), round_up(max(offset, 1), ALIGN_NUMEL * num_shards), num_shards)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def is_dense(self) -> bool:
        """Whether slots follow each other without gaps (padding behind the last aside)."""
        return all(left.end == right.offset for left, right in zip(self.slots, self.slots[1:], strict=False))

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's range, with padding; the same for all ranks."""
        return self.padded_numel // self.num_shards

    def shard(self, rank: int) -> slice:
        """The range of one rank."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

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
