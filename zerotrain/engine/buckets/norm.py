"""The global gradient norm, with bits that no bucket border, padding or number of shards can change.

A sum of floating-point numbers depends on its order, and the order would follow the buckets. So the sum is made exact:

1. Each block of 64 elements lies within one parameter and one shard at any bucket size (`ALIGN_NUMEL`). Its sum
   of squares is a number that depends on the block alone.
2. Each of these numbers is cut on a fixed grid into digits of 24 bits, digit e counting multiples of 2**(24 e). Digits
   are integers, and fp64 adds fewer than 2**29 of them exactly, in any order. (Binned summation: Demmel and
   Nguyen, "Parallel Reproducible Summation", IEEE Trans. Comput. 2015.)
   A sum takes some twenty small operations, so the blocks of many buckets are cut in one go (`StepSquares`).
3. The ranks exchange the sums of their three highest digits; of those the three highest over all ranks count, at least
   49 bits of the sum.

A GPU adds the elements of a block in an order that depends on how many blocks there are, and each small operation is a
launch. So there the 64 squares of a block are added by halves, which is one tree for every block, and digits are summed
once a step: 8 kernels for each bucket. A shard is one block, 3 kernels, with reductions that have no fixed bits either
(`native`, `fp32`).
"""

import math

import torch

from zerotrain.device.kinds import device_of
from zerotrain.sharding.layout import ALIGN_NUMEL

DIGIT_BITS = 24
NUM_DIGITS = 3
CHUNK_NUMEL = 2**17
"""Elements squared at a time: the fp64 copy of a chunk (1 MiB) stays in the cache."""
MAX_SQUARES = 2**15
"""Blocks from which on digits are summed (256 KiB of squares, of 2 M elements). Not all of a step at its end, where the
other ranks wait: most is to be done beside the reductions that are still under way."""
TREE_NUMEL = 2**23
"""Elements squared at a time on a GPU: their fp64 copy takes 64 MiB."""
_NO_DIGIT = -1000.0
"""The top digit of an all-zero shard: below that of any fp64 number."""


def block_squares(shard: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """The sum of squares of each block of a shard.

    Args:
        shard: (n,) any floating dtype, n a multiple of 64.
        exact: square in fp64, for a norm that gradients are clipped by; otherwise in fp32, five times faster, for a
            norm that is only shown (and that is infinite already where squares leave fp32). On a GPU that is then the
            norm of the shard, taken as one block.

    Returns:
        (n / 64,) fp64, or (1,).
    """
    device = device_of(shard.device)
    if not exact:
        rows = shard.view(-1, ALIGN_NUMEL) if device.is_host else shard
        norms = torch.linalg.vector_norm(rows, dim=1 if device.is_host else None, dtype=torch.float32)
        return norms.to(torch.float64).view(-1).square_()
    sums = torch.empty(shard.numel() // ALIGN_NUMEL, dtype=torch.float64, device=shard.device)
    if not device.is_host:
        squares_by_tree(shard, sums)
        return sums
    widened = torch.empty(min(CHUNK_NUMEL, shard.numel()), dtype=torch.float64, device=shard.device)
    roots = sums
    if not device.holds_values:  # each further chunk does as the first, in the same memory
        shard, roots = shard[:CHUNK_NUMEL], sums[: CHUNK_NUMEL // ALIGN_NUMEL]
    for chunk, out in zip(shard.split(CHUNK_NUMEL), roots.split(CHUNK_NUMEL // ALIGN_NUMEL), strict=True):
        values = widened[: chunk.numel()].copy_(chunk)
        torch.linalg.vector_norm(values.view(-1, ALIGN_NUMEL), dim=1, out=out)
    return sums.square_()


def squares_by_tree(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Leave the sum of squares of each block of `values`, (n,), in `sums`, (n / 64,) fp64: in 8 operations, which add
    the same elements in the same order whatever n is. fp64 holds the squares of fp32 exactly."""
    for chunk, out in zip(values.split(TREE_NUMEL), sums.split(TREE_NUMEL // ALIGN_NUMEL), strict=True):
        rows = chunk.view(-1, ALIGN_NUMEL).to(torch.float64, copy=True)
        width = ALIGN_NUMEL // 2
        lower, upper = rows[:, :width], rows[:, width:]
        lower.mul_(lower).addcmul_(upper, upper)
        while width > 2:
            width //= 2
            rows[:, :width].add_(rows[:, width : 2 * width])
        torch.add(rows[:, 0], rows[:, 1], out=out)


class StepSquares:
    """The squares of all blocks of a step, and what the norm is made of."""

    def __init__(self) -> None:
        self._squares: list[torch.Tensor] = []
        self._numel = 0
        self._sums: list[torch.Tensor] = []
        """(4,) each, of those that are no longer kept."""

    def clear(self) -> None:
        """Forget them."""
        self._squares.clear()
        self._sums.clear()
        self._numel = 0

    def add(self, squares: torch.Tensor) -> None:
        """(m,) fp64 non-negative, which may be overwritten."""
        self._squares.append(squares)
        self._numel += squares.numel()
        if self._numel >= MAX_SQUARES and device_of(squares.device).is_host:
            self._sum_up()

    def digit_sums(self) -> torch.Tensor:
        """(4,) fp64 as from `digit_sums`, of all that were added, one at least."""
        if self._squares:
            self._sum_up()
        return self._sums[0] if len(self._sums) == 1 else add_digit_sums(torch.stack(self._sums))

    def follow_graph(self, sums: torch.Tensor) -> None:
        """A graph has left the result of `digit_sums` here."""
        self.clear()
        self._sums.append(sums)

    def _sum_up(self) -> None:
        self._sums.append(digit_sums(torch.cat(self._squares)))
        self._squares.clear()
        self._numel = 0


def digit_sums(squares: torch.Tensor) -> torch.Tensor:
    """(m,) fp64 non-negative, overwritten -> (4,) fp64: the top digit's number, infinite if a square is not finite, and
    the sums of the top three digits."""
    largest = squares.max()
    # frexp: largest = mantissa * 2**exponent with mantissa in [0.5, 1), so its highest bit counts 2**(exponent - 1).
    top = torch.div(torch.frexp(largest).exponent - 1, DIGIT_BITS, rounding_mode="floor").to(torch.float64)
    sums = []
    for place, unit in enumerate(_power_of_two(DIGIT_BITS * (top - _places(squares.device))), 1):
        digit = torch.div(squares, unit).floor_()
        sums.append(digit.sum())
        if place < NUM_DIGITS:
            squares.addcmul_(digit, unit, value=-1)
    highest = torch.where(largest > 0, top, _NO_DIGIT)
    return torch.stack([torch.where(largest.isfinite(), highest, math.inf), *sums])


def add_digit_sums(rows: torch.Tensor) -> torch.Tensor:
    """(n, 4) from `digit_sums` -> (4,) that of all their squares, whatever the order of the rows."""
    top = rows[:, 0].max()
    places = _places(rows.device)
    place = (top - rows[:, :1]) + places
    sums = torch.where(place == places.view(-1, 1, 1), rows[:, 1:], 0.0).sum(dim=(1, 2))
    return torch.cat([top.view(1), sums])


def norm_of_digit_sums(sums: torch.Tensor) -> torch.Tensor:
    """(4,) from `digit_sums` -> 0-dim fp64: the L2 norm, NaN if any square is not finite."""
    top = sums[0]
    units = _power_of_two(DIGIT_BITS * (top - _places(sums.device)))
    high, middle, low = (sums[1:] * units).unbind()
    return torch.where(top == math.inf, math.nan, (low + middle + high).sqrt())


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(NUM_DIGITS, dtype=torch.float64, device=device)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp64 integers -> 2**exponent to the last bit (exp2 need not be), from the smallest normal number up."""
    biased = exponent.clamp(-1022, 1023).to(torch.int64) + 1023
    return (biased << 52).view(torch.float64)


def clip_coefficient(norm: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """0-dim fp64: what gradients are multiplied with, as torch.nn.utils.clip_grad_norm_ has it; 1 for no clipping."""
    if max_norm is None:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
