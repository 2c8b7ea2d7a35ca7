"""Part of the devices' peak that a model's own arithmetic takes: MFU as PaLM counts it (arXiv 2204.02311, app. B)."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class ModelFlops:
    """What MFU is computed from."""

    per_sequence: float
    """Floating point operations of the forward and backward of one sequence. What a run computes twice to save memory
    is not in it."""
    peak_per_s: float
    """Floating point operations per second that the devices of all ranks can do together."""

    def utilization(self, sequences_per_s: float) -> float:
        """MFU, from 0 to 1, at so many sequences per second over all ranks."""
        return sequences_per_s * self.per_sequence / self.peak_per_s


def count_flops(model: nn.Module, sequence: tuple[torch.Tensor, torch.Tensor]) -> int | None:
    """Count the floating point operations of the forward and backward of one sequence, without computing any.

    Args:
        model: on the meta device, as it was built: forward(ids, labels) -> mean loss.
        sequence: (ids (T,), labels (T,)).

    Returns:
        Those of matrix products, convolutions and attention; None where the forward needs values, which tensors on
        the meta device do not have.
    """
    ids, labels = (part[None].to("meta") for part in sequence)
    with FlopCounterMode(display=False) as counter:
        try:
            model(ids, labels).backward()
        except RuntimeError:
            return None
    return counter.get_total_flops()
