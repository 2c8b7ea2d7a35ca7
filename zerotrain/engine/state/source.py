"""The noun for state that comes into an engine: what a source has by name, and how `fill` gets elements of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import NamedPiece
from zerotrain.sharding.units import ManagedParameter


class KeptTensor(NamedTuple):
    """A tensor that the optimizer keeps, without its numbers."""

    shape: tuple[int, ...] | None
    """The shape that is kept of a tensor that is updated whole; None: a number for each element."""
    dtype: torch.dtype


class KeptOnce(NamedTuple):
    """A value that the optimizer keeps once for all elements, such as the number of its steps."""

    value: Any
    on_device: bool

    def placed(self, device: torch.device) -> Any:
        """A copy for one span: of one that two shared every step would count twice."""
        return self.value.to(device, copy=True) if self.on_device else deepcopy(self.value)


Keeps = Mapping[str, KeptTensor | KeptOnce]
"""All that an optimizer keeps of a parameter, by name."""


class Source(ABC):
    """State by name and element. `fill` alone writes it into buckets; a source only reads."""

    doing = ""
    """The call in words, such as "loading PATH", for errors that one rank meets alone."""
    is_collective = False
    """True where the ranks read together, so that none can fail alone."""
    has_state = False
    """True where it has what the optimizer keeps. Otherwise that stays, and weights alone are replaced."""

    has_average = False
    """True where it has an average of the weights too. One that has state and no average leaves none."""

    def begin(self, bucket: Bucket, role: str) -> None:
        """Get ready to read of one bucket in one role. A collective source sends here, and nowhere else."""
        return

    @abstractmethod
    def read(self, piece: NamedPiece) -> None:
        """Read the elements of a piece into its memory; leave them as they are where the source does not have them."""

    def keeps(self, managed: ManagedParameter) -> Keeps:
        """Tell what the optimizer is to keep of a parameter; the same on all ranks."""
        return {}

    def hand_over(self, bucket: Bucket, role: str, where: slice | int) -> torch.Tensor | None:
        """Memory of the source that can be kept instead of a copy; None: there is none, and `read` is called.

        Args:
            where: elements of the bucket, or the slot of a tensor that is updated whole.
        """
        return None

    def fill_rest(self) -> None:
        """Fill what lies in no bucket: buffers, and what modules keep beside their tensors."""
        return
