"""What an engine is told once, when it is built."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from zerotrain.engine.loss_scale import LossScaler
from zerotrain.engine.precision import Precision
from zerotrain.sharding.plan import Plan


@dataclass(frozen=True)
class EngineOptions:
    """What is sharded and how it is moved, computed and clipped. Meaning and units as in `zerotrain.config.schema`."""

    plan: Plan
    precision: Precision
    bucket_mb: float
    overlap: bool
    prefetch: int
    ordered: bool
    """Reduce in rank order in fp32; False: by the backend's reduce-scatter."""
    units: Sequence[str] | None
    """Module name patterns; None: the repeated blocks."""
    reshard_after_forward: bool
    max_grad_norm: float | None
    max_skipped_steps: int

    def settings(self, loss_scaler: LossScaler | None) -> dict[str, object]:
        """What must be the same on all ranks, by the names of the settings."""
        plan, precision = self.plan, self.precision
        moves = ("bucket_mb", "overlap", "prefetch", "units", "reshard_after_forward")
        return {
            "zero.stage": ", ".join(f"{each.name} {getattr(plan, each.name).value}" for each in fields(plan)),
            **{f"zero.{name}": getattr(self, name) for name in moves},
            "zero.reduction": "ordered" if self.ordered else "native",
            "precision": precision.name,
            "precision.keep_fp32": list(precision.keep_fp32),
            "precision.initial_scale": loss_scaler and loss_scaler.scale,
            "precision.growth_interval": loss_scaler and loss_scaler.growth_interval,
            "train.max_grad_norm": self.max_grad_norm,
            "train.max_skipped_steps": self.max_skipped_steps,
        }
