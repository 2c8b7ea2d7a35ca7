"""Which dtypes compute, travel and are kept, and the cast of inputs at the root."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zerotrain.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run."""

    name: str
    compute: torch.dtype
    """Weights the model sees, activations, gradients and everything on the wire."""
    master: torch.dtype = torch.float32
    """Master weights, optimizer state, and sums of gradients over micro-batches and ranks."""

    @property
    def separate_master(self) -> bool:
        """Whether the master weight is a copy; in fp32 it shares the model weight's storage."""
        return self.compute != self.master

    def cast_inputs(self, inputs: Any) -> Any:
        """Floating-point tensors anywhere in `inputs`, in the compute dtype; all else as it is."""

        def cast(leaf: Any) -> Any:
            return leaf.to(self.compute) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return pytree.tree_map(cast, inputs) if self.separate_master else inputs


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
}


def precision_named(name: str) -> Precision:
    """The precision called `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name}: is none of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
