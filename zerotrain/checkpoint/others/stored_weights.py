"""Weights that lie somewhere and can be read: which tensors there are, and their elements by number."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor that can be read."""

    names: Sequence[str]
    """Several of a tied one; any is enough."""
    kind: str
    """Its dtype, as the format calls it."""
    dtype: torch.dtype | None
    """None for one that cannot be read, and for a tensor without elements of which nothing was written."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Tells the order in which its elements lie there."""
    place: Any
    """Its location, in the form that its `Weights` uses."""
    part: str = ""
    """The entry that holds it, if a file holds more than weights: "model" of {"model": ..., "optim": ...}."""


class Weights(ABC):
    """A source of weights, open until `close`.

    Its methods raise CheckpointError, naming the file.
    """

    path: Path
    tensors: list[StoredTensor]
    fingerprint: str
    """Two ranks that see the same see the same checkpoint, or files of the same names, dtypes and shapes."""
    _opened: ExitStack

    def problems(self, taken: Sequence[StoredTensor], part: int, num_parts: int) -> list[str]:
        """Problems of the files that opening them did not find, in this share of them.

        Args:
            taken: the tensors that will be read.
        """
        return []

    @abstractmethod
    def read(self, tensor: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Elements from `start` on, in the order of `tensor.stride`, into all of `target`, (n,)."""

    def close(self) -> None:
        self._opened.close()


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in the order of its dimensions."""
    stride = [1]
    for length in shape[:0:-1]:
        stride.append(stride[-1] * max(1, length))
    return tuple(stride[::-1]) if len(shape) else ()
