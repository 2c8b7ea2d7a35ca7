"""zerotrain's own engine."""

from functools import partial

import torch
from torch import nn

import zerotrain
from benchmarks.engines import Traffic
from benchmarks.workload import LEARNING_RATE, Workload


class ZerotrainTraining:
    """One ZeroEngine."""

    def __init__(self, engine: zerotrain.ZeroEngine, num_micro_batches: int) -> None:
        self.engine = engine
        self.num_micro_batches = num_micro_batches

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """See `Engine.step`."""
        return self.engine.train_step(micro_batches).loss

    def traffic(self) -> Traffic | None:
        """See `Engine.traffic`."""
        return Traffic(
            counted_nbytes=self.engine.ledger.last_step.sent_nbytes,
            theory_nbytes=self.engine.theoretical_sent_nbytes(self.num_micro_batches),
        )


def build(model: nn.Module, workload: Workload, *, stage: int) -> ZerotrainTraining:
    """Train by our engine at a ZeRO stage; weight decay on every parameter, as AdamW does by itself."""
    engine = zerotrain.build_engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=workload.bucket_mb),
        precision=workload.precision,
        decay_all=True,
        compile=workload.compiled,
    )
    return ZerotrainTraining(engine, workload.num_micro_batches)
