"""Weights out of files: the list of their tensors, and their elements by number."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerotrain.files.match import StoredTensor, memory_order

METADATA = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""
CHUNK_NUMEL = 2**17
"""Held at a time, a few times over, where elements lie in another order in a file."""


class Weights(ABC):
    """A source of weights, open until `close`.

    Its methods raise CheckpointError, naming the file.
    """

    path: Path
    tensors: list[StoredTensor]
    fingerprint: str
    """Two ranks that see the same see the same checkpoint, or files of the same names, dtypes and shapes."""
    _opened: ExitStack

    def problems(self, tensors: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        """Further problems of the files, after opening them, in this share of them.

        Args:
            tensors: those to be read.
        """
        return []

    @abstractmethod
    def fill(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Read elements from `start` on, in the order of `tensor.stride`, into all of `target`, (n,)."""

    def close(self) -> None:
        self._opened.close()


def read_box(
    read: Callable[[int, torch.Tensor], object],
    box: StoredTensor,
    stride: Sequence[int],
    begin: int,
    target: torch.Tensor,
) -> None:
    """Read the elements of a box that belong into a part of a tensor.

    A box in the order of the tensor is read from the first of these elements to the last, and one in another order
    whole; some elements at a time, unless they are neighbours in both.

    Args:
        read: fills a tensor with elements of the box from a number on, in the order of its memory in the file.
        box: its dtype, shape and strides in the file.
        stride: that of the tensor, of whose elements it is a box.
        begin: place of the box' first element in `target`, below 0 if it lies before it.
        target: (n,), of any dtype and device: neighbours in the tensor.
    """
    order, first, stop = memory_order(box.shape, box.stride), 0, prod(box.shape)

    def place(number: Any) -> Any:
        """The place in `target` of an element of the box, or of several."""
        total = begin
        for dim in reversed(order):
            total = total + number % box.shape[dim] * stride[dim]
            number = number // box.shape[dim]
        return total

    if order == memory_order(box.shape, stride):  # places ascend with numbers
        first = bisect_left(range(stop), 0, key=place)
        stop = bisect_left(range(stop), target.numel(), key=place)
        if first < stop and place(stop - 1) - place(first) == stop - 1 - first:
            read(first, target[place(first) : place(stop - 1) + 1])
            return
    for start in range(first, stop, CHUNK_NUMEL):
        values = torch.empty(min(CHUNK_NUMEL, stop - start), dtype=box.dtype)
        read(start, values)
        places = place(torch.arange(start, start + values.numel()))
        is_inside = (places >= 0) & (places < target.numel())
        target[places[is_inside].to(target.device)] = values[is_inside].to(target)
