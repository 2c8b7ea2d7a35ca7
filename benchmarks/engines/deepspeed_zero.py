"""DeepSpeed, configured as its ZeRO tutorial does."""

from typing import Any

import deepspeed
import torch
from torch import nn

from benchmarks.engines import Traffic
from benchmarks.engines.plain import adamw
from benchmarks.workload import Workload


class DeepSpeedTraining:
    """DeepSpeed's training loop. It counts micro-batches itself and divides the loss by their number."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """See `Engine.step`."""
        losses = []
        for inputs in micro_batches:
            loss = self.engine(*inputs)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def traffic(self) -> Traffic | None:
        """See `Engine.traffic`."""
        return None


def build(model: nn.Module, workload: Workload, *, stage: int) -> DeepSpeedTraining:
    """Train by DeepSpeed at a ZeRO stage."""
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": workload.shape.micro_batch_size,
            "gradient_accumulation_steps": workload.num_micro_batches,
            "zero_optimization": {
                "stage": stage,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_scatter": True,
            },
            "gradient_clipping": workload.max_grad_norm or 0.0,  # its default is 1.0
            "bf16": {"enabled": workload.precision == "bf16"},
            "steps_per_print": 1_000_000,
        },
    )
    if workload.compiled:
        engine.compile()
    return DeepSpeedTraining(engine)
