"""What the engine says about a step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the mean gradient before clipping; NaN if any element was not finite."""
    clip_coefficient: float
    """What the gradient was multiplied with; 1.0 for no clipping."""
    skipped: bool
    """Whether the weights were left as they were, because the gradient was not finite."""
    loss_scale: float
    """What the losses of this step were multiplied with for the backward; 1.0 but in fp16."""
    signals: tuple[int, ...]
    """What each rank had in `engine.signal` in this step, by rank; the same on all ranks."""


@dataclass(frozen=True)
class TrainStepResult(StepResult):
    """What one step over several micro-batches did."""

    loss: torch.Tensor
    """0-dim fp64: this rank's weighted sum of the losses of its micro-batches, detached. In fp64 since losses in fp32
    add up there without rounding, so that their mean over the ranks is the same on any number of ranks."""
