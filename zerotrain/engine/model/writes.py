"""What others than the engine write into the parameters of a bucket: `load_state_dict`, `clamp_`, `p.data.mul_`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_MODULUS = 2**50
"""fp64 holds whole numbers up to 2**53, and the stamp of a step is made of them."""

_version_of: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


class Writes:
    """Finds them by PyTorch's own count: the version of a parameter grows with each write but those to `p.data`.

    Args:
        parameters: of the bucket; the engine itself writes to their memory, which counts nothing.
    """

    may_be_uncounted = False
    """Whether somebody got hold of a parameter's `data` since the last look: what is written there counts nothing."""
    are_new = False
    """Whether a look found any that the master weight does not have yet."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._digest = 0
        self._num_versions = self._count()

    def _count(self) -> int:
        # Of parameters that are not ready each would be a call into Python.
        with torch._C.DisableTorchFunctionSubclass():
            return sum(map(_version_of, self._parameters))

    def look(self, weights: torch.Tensor) -> bool:
        """Whether there may be any since the last look.

        Args:
            weights: all of the bucket, as the model reads it.
        """
        counted = (num_versions := self._count()) != self._num_versions
        if not (counted or self.may_be_uncounted):
            return False
        self._num_versions, self.may_be_uncounted, self.are_new = num_versions, False, True
        if counted:
            self._digest = (31 * self._digest + _digest(weights) + 1) % _MODULUS
        return True

    @property
    def digest(self) -> int:
        """Of the weights as they were written since it was forgotten, a whole number below 2**50: all ranks must have
        written the same. 0 if nobody has, or through `p.data` alone."""
        return self._digest

    def forget_digest(self) -> None:
        """The ranks have compared it, and gone on."""
        self._digest = 0

    def start_anew(self) -> None:
        """The engine has replaced the weights; what was written before is gone."""
        self.count_update()
        self._num_versions = self._count()
        self.may_be_uncounted = self.are_new = False
        self._digest = 0

    def count_update(self) -> None:
        """The engine has changed the weights: PyTorch must refuse a graph from before, which would compute its
        gradients with weights it was not made with."""
        torch.autograd.graph.increment_version(self._parameters)
        self._num_versions += len(self._parameters)


def _digest(weights: torch.Tensor) -> int:
    """Of the bits of all weights. It waits for the device, which is paid by those who write."""
    whole = {2: torch.int16, 4: torch.int32}[weights.itemsize]
    return int(weights.view(whole).sum(dtype=torch.int64).item()) % _MODULUS
