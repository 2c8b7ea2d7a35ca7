"""DistributedDataParallel, and ZeroRedundancyOptimizer on top of it, set up as PyTorch's documentation does."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engines.plain import MasterWeightAdamW, TorchTraining, adamw
from benchmarks.workload import LEARNING_RATE, Workload


class DdpTraining(TorchTraining):
    """PyTorch's training loop around a DistributedDataParallel."""

    model: DistributedDataParallel

    def synchronisation(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()


def build(
    model: nn.Module, workload: Workload, *, bf16_weights: bool = False, sharded_optimizer: bool = False
) -> DdpTraining:
    """Average gradients by DDP.

    Args:
        bf16_weights: bf16 weights and gradients with fp32 master weights, in place of autocast.
        sharded_optimizer: ZeRO stage 1 by ZeroRedundancyOptimizer.
    """
    if bf16_weights:
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if workload.compiled:
        wrapped.compile()
    if bf16_weights:
        return DdpTraining(wrapped, MasterWeightAdamW(parameters), workload)
    optimizer: torch.optim.Optimizer
    if sharded_optimizer:
        optimizer = ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )
    else:
        optimizer = adamw(parameters)
    return DdpTraining(wrapped, optimizer, workload, autocast=workload.precision == "bf16")
