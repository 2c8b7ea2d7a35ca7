"""Plain PyTorch on each rank alone: the floor, and the base of the engines that PyTorch brings."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.engines import Traffic
from benchmarks.workload import LEARNING_RATE, Workload

Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""(ids, labels) of each micro-batch."""


class TorchTraining:
    """Forward, backward and step the way PyTorch's tutorials write them.

    Args:
        autocast: compute in bf16 on fp32 weights (torch.amp), PyTorch's documented mixed precision.
    """

    def __init__(self, model: nn.Module, optimizer: Any, workload: Workload, *, autocast: bool = False) -> None:
        self.model = model
        self.max_grad_norm = workload.max_grad_norm
        self.optimizer = optimizer
        self.autocast = autocast
        self.device_type = next(model.parameters()).device.type

    def step(self, micro_batches: Batches) -> torch.Tensor:
        """See `Engine.step`."""
        loss = self.accumulate(micro_batches)
        self.update()
        return loss

    def accumulate(self, micro_batches: Batches) -> torch.Tensor:
        """Forwards and backwards; returns the mean loss, 0-dim, detached."""
        losses = []
        for index, inputs in enumerate(micro_batches):
            with self.synchronisation(last=index == len(micro_batches) - 1):
                with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.autocast):
                    loss = self.model(*inputs) / len(micro_batches)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self) -> None:
        """Clip, update, and forget the gradients."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronisation(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around a forward and backward: send gradients only if it is the last before the step."""
        return nullcontext()

    def traffic(self) -> Traffic | None:
        """See `Engine.traffic`."""
        return None


class MasterWeightAdamW:
    """AdamW on fp32 copies of bf16 parameters, with the copies between them and nothing else."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.masters: list[torch.Tensor] = [parameter.detach().float() for parameter in self.parameters]
        self.gradients = [torch.empty_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.optimizer = adamw(self.masters)

    def step(self) -> None:
        with torch.no_grad():
            arrived = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            torch._foreach_copy_(self.gradients, arrived)
            self.optimizer.step()
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """The optimizer of every engine. On a GPU a graph may hold its step."""
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True, capturable=parameters[0].is_cuda)


def build(model: nn.Module, workload: Workload, *, bf16_weights: bool = False) -> TorchTraining:
    """Each rank trains alone.

    Args:
        bf16_weights: bf16 weights and gradients with fp32 master weights, in place of autocast.
    """
    if workload.compiled:
        model.compile(fullgraph=True)
    if bf16_weights:
        model.to(torch.bfloat16)
        return TorchTraining(model, MasterWeightAdamW(model.parameters()), workload)
    return TorchTraining(model, adamw(model.parameters()), workload, autocast=workload.precision == "bf16")
