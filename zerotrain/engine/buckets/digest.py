"""Digests: two sums over the bits of a tensor, by which ranks compare what they hold.

For the words w[0], w[1], ... of a tensor a digest is (sum of w[i], sum of i * w[i]) modulo 2**64. If one word is wrong
by d, the first sum is wrong by d and the second by i * d: two digests tell the place of one wrong word. A digest of a
part, moved to its place, can be added to those of the other parts.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK = 2**18
"""Words widened at a time."""


@cache
def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK, device=device)


Digest = tuple[int, int]
"""On the host, as whole numbers of 64 bits with a sign."""


def sum_of(digests: Iterable[Digest]) -> Digest:
    """The digest of a tensor by those of its parts, each at its place."""
    first, second = (_signed(sum(numbers)) for numbers in zip(*digests, strict=True))
    return first, second


def word_nbytes(itemsize: int) -> int:
    """Bytes of a word of elements of so many bytes."""
    return min(itemsize, max(_WORDS))


@torch.no_grad()
def digest(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """(2,) int64, on the device of the values.

    Args:
        values: of any shape.
        start: place of its first element in a larger tensor.
    """
    words = values.detach().contiguous().view(-1).view(_WORDS[word_nbytes(values.itemsize)])
    first = start * values.itemsize // word_nbytes(values.itemsize)
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    places = _places(values.device)
    for place in range(0, words.numel(), _CHUNK):
        chunk = words[place : place + _CHUNK].to(torch.int64)
        total = chunk.sum()
        sums[0] += total
        sums[1] += (chunk * places[: len(chunk)]).sum() + (first + place) * total
    return sums


def wrong_element(first: Sequence[int], second: Sequence[int], itemsize: int) -> int | None:
    """The place of the one element in which two tensors differ, by their digests; None: they differ in several."""
    difference, moment = (_signed(one - other) for one, other in zip(first, second, strict=True))
    if difference == 0 or abs(difference) >= 2**32 or moment % difference or moment // difference < 0:
        return None
    return moment // difference * word_nbytes(itemsize) // itemsize


def _signed(number: int) -> int:
    """The number of 64 bits with a sign that it is modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63
