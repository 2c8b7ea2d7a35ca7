"""Results of a step, and of loading weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.errors import listed


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the mean gradient before clipping; NaN if any element was not finite."""
    clip_coefficient: float
    """Factor of the gradient; 1.0 for no clipping."""
    skipped: bool
    """Whether the weights were left as they were, because the gradient was not finite."""
    loss_scale: float
    """Factor of this step's losses in the backward; 1.0 but in fp16."""
    signals: tuple[int, ...]
    """Each rank's `engine.signal` in this step, by rank; the same on all ranks."""
    mean_loss: float
    """Mean over all ranks of `TrainStepResult.loss`; NaN of `engine.step`, which is told no loss."""
    update_hash: str
    """Equal where steps have the same norm, rates and scales: see `zerotrain.engine.optimizer_step`."""


@dataclass(frozen=True)
class TrainStepResult(StepResult):
    """Result of one step over several micro-batches."""

    loss: torch.Tensor
    """0-dim fp64: the weighted sum of the losses of a virtual rank's micro-batches, as a mean over those of this rank,
    detached. In fp64 since losses in fp32 add up there without rounding, so that their mean over the ranks is the same
    on any number of ranks."""


@dataclass(frozen=True)
class StageSwitch:
    """Result of `engine.set_stage`."""

    stage: int
    """The stage since then."""
    sent_nbytes: int
    """Bytes this rank has sent for it."""
    theory_sent_nbytes: int
    """(N-1)/N of the bytes of what N ranks shared before and hold whole now."""


@dataclass(frozen=True)
class LoadedWeights:
    """The weights taken by `engine.load_weights`, and those left. Names are the model's, but for `surplus`."""

    path: Path
    """The path read: a file or a folder; for a run's folder its newest checkpoint."""
    num_loaded: int
    """Tensors of the model, tied ones counted once."""
    missing: tuple[str, ...]
    """Not there, and left as they were."""
    surplus: tuple[str, ...]
    """There, and not in the model."""
    wrong_shape: tuple[str, ...]
    """A sentence for each tensor that was left as it was, since it has another shape there."""
    wrong_dtype: tuple[str, ...]
    """The same of integers for floating-point numbers, and the like."""
    renamed: str
    """How all names there differ from the model's, in a sentence; empty if they do not."""
    part: str = ""
    """The part read of a file with more than weights, in a sentence; else empty."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model was left as it was."""
        return not (self.missing or self.wrong_shape or self.wrong_dtype)

    def told(self, max_names: int = 5) -> list[str]:
        """Sentences for a user: what was loaded, and what was not."""
        lines = [
            "; ".join(filter(None, (f"{self.num_loaded} tensors loaded from {self.path}", self.part, self.renamed)))
        ]
        for names, reason in (
            (self.missing, "not in it, and left as they are"),
            (self.surplus, "in it, and not in the model"),
            (self.wrong_shape, "of another shape, and left as they are"),
            (self.wrong_dtype, "of another kind, and left as they are"),
        ):
            if names:
                lines.append(f"{len(names)} {reason}: {listed(names, max_names)}")
        return lines
