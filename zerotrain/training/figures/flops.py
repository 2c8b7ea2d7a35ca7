"""Part of the devices' peak that a model's own arithmetic takes: MFU as PaLM counts it (arXiv 2204.02311, app. B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zerotrain.data.fetch import as_inputs, to_device


@dataclass(frozen=True)
class ModelFlops:
    """The numbers from which MFU is computed."""

    per_sequence: float
    """Floating point operations of the forward and backward of one sequence. Recomputation to save memory is not
    counted."""
    peak_per_s: float
    """Floating point operations per second that the devices of all ranks can do together."""

    def utilization(self, sequences_per_s: float) -> float:
        """MFU, from 0 to 1, at so many sequences per second over all ranks."""
        return sequences_per_s * self.per_sequence / self.peak_per_s


def count_flops(model: nn.Module, batch: Any) -> int | None:
    """Count the floating point operations of the forward and backward of one micro-batch, without computing any.

    Args:
        model: on the meta device, as it was built: gives the mean loss of what is in the batch.
        batch: such as (ids (1, T), labels (1, T)).

    Returns:
        Those of matrix products, convolutions and attention; None where the forward needs values, which tensors on
        the meta device do not have.
    """
    inputs = as_inputs(to_device(batch, torch.device("meta")))
    with FlopCounterMode(display=False) as counter:
        try:
            (model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)).backward()
        except RuntimeError:
            return None
    return counter.get_total_flops()
