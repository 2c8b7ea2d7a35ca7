"""A step of an optimizer on memory that it does not own: the engine's weights, and gradients that are there for a step.

In plain PyTorch a weight is the optimizer's to replace (`p.data = ...`, `p.set_`, `torch.utils.swap_tensors`), and a
gradient its to keep. Here others read the memory of both. So what a weight has become is brought back into its memory,
and what is kept of either gets memory of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerotrain.engine.buckets.parts.whole_tensors import Updates
from zerotrain.errors import EngineStateError


def step_on_lent(optimizer: torch.optim.Optimizer, updates: Updates) -> None:
    """Let an optimizer update tensors by their gradients. Each has the same memory under it afterwards.

    Raises:
        EngineStateError: it gave one of them another shape or dtype.
    """
    lent = [target.detach() for target, _ in updates]
    for target, gradient in updates:
        target.grad = gradient
    try:
        optimizer.step()
    finally:
        for target, gradient in updates:
            target.grad = None
            _keep_apart(optimizer, target, gradient)
        replaced = [
            (target, memory)
            for (target, _), memory in zip(updates, lent, strict=True)
            if target.dtype != memory.dtype or not target.is_set_to(memory)
        ]
        if replaced:
            _bring_back(optimizer, replaced)


def _keep_apart(optimizer: torch.optim.Optimizer, target: torch.Tensor, lent: torch.Tensor) -> None:
    """Give memory of its own to what the optimizer keeps of a tensor, if that is a part of memory that is lent."""
    state: dict[str, Any] = optimizer.state.get(target, {})
    start = lent.data_ptr()
    for name, value in state.items():
        if type(value) is torch.Tensor and start <= value.data_ptr() < start + lent.nbytes:
            state[name] = value.clone()


def _bring_back(optimizer: torch.optim.Optimizer, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy what tensors have become into the memory that they had before, and put that under them again."""
    became = []
    for target, memory in replaced:
        _keep_apart(optimizer, target, memory)
        new = target.detach()
        is_part = new.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        became.append(new.clone() if is_part else new)  # a transposed view would be read half written
        target.data = memory
    for new, (_, memory) in zip(became, replaced, strict=True):
        if (new.shape, new.dtype) != (memory.shape, memory.dtype):
            raise EngineStateError(
                f"optimizer={type(optimizer).__name__}: its step made a weight of shape {tuple(memory.shape)} and "
                f"{memory.dtype} one of {tuple(new.shape)} and {new.dtype}; let it keep both"
            )
        memory.copy_(new)
