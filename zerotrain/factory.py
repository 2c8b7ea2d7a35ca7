"""The one place where config becomes objects."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zerotrain.comm.world import World
from zerotrain.config.schema import ZeroConfig
from zerotrain.engine.build import EngineOptions
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.precision import precision_named
from zerotrain.sharding.plan import plan_for


def build_engine(
    model: nn.Module,
    *,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    zero: ZeroConfig | None = None,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    decay_all: bool = False,
    world: World | None = None,
) -> ZeroEngine:
    """Wrap a model in the sharded engine.

    Args:
        model: any nn.Module, built alike on every rank; changed in place (see `ZeroEngine`).
        optimizer: makes an element-wise torch optimizer from parameter groups, such as
            `functools.partial(torch.optim.AdamW, lr=3e-4, fused=True)`.
        zero: how state is sharded and moved; default `ZeroConfig()`, stage 2.
        precision: fp32 or bf16.
        max_grad_norm: clip the global L2 norm of the gradient to this; None for no clipping.
        decay_all: apply weight decay to every parameter, not to matrices alone.
        world: default: the process group the caller has initialised, or one process, on the device of the model's
            first parameter.

    Raises:
        ConfigError: a setting is out of range, or the model or optimizer cannot be trained so.
    """
    zero = zero or ZeroConfig()
    if world is None:
        first = next(model.parameters(), None)
        world = World.current(first.device if first is not None else torch.device("cpu"))
    return ZeroEngine(
        model,
        optimizer=optimizer,
        world=world,
        plan=plan_for(zero.stage, world.size),
        options=EngineOptions(
            bucket_mb=zero.bucket_mb,
            overlap=zero.overlap,
            prefetch=zero.prefetch,
            ordered=zero.reduction == "ordered" or (zero.reduction == "auto" and world.device.type == "cpu"),
            units=None if zero.units == "auto" else list(zero.units),
            reshard_after_forward=zero.reshard_after_forward,
        ),
        precision=precision_named(precision),
        max_grad_norm=max_grad_norm,
        decay_all=decay_all,
    )
