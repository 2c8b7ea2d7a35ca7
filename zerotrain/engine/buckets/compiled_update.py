"""AdamW in one pass over the memory of a span, compiled: widen the gradient, scale it, update, round the weight.

torch's optimizers need the gradient in fp32: one pass writes it, and another rounds the weight behind them. In 16 bits
these are 12 of the 40 bytes that an update moves for each element. The formula is that of torch.optim.AdamW, and its
state has the same names and meaning, so either goes on with the other's checkpoint. The bits are others, since the
compiler rounds elsewhere. They are the same for any cut into spans: each begins and ends at a multiple of 64 elements.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.groups.optimizers import WHOLE, is_torchs_own
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.model.forward import require_compiler
from zerotrain.errors import ConfigError, argument

_UNKNOWN = ("amsgrad", "maximize", "differentiable")
"""Options of AdamW that are not compiled."""


def require_compilable(groups: ParamGroups, *, on_host: bool) -> None:
    """Refuse groups whose update cannot be compiled, and machines without a compiler.

    Args:
        on_host: the update is offloaded to the host.

    Raises:
        ConfigError: the update is not that of AdamW, or this machine lacks what torch.compile needs.
    """
    name = argument("zero.compiled_update", True)
    is_adamw = not any(group["name"].startswith(WHOLE) for group in groups.hyperparameters)
    if is_adamw:
        sample = groups.optimizer_of((number, torch.zeros(1)) for number in range(len(groups.hyperparameters)))
        is_adamw = type(sample) is torch.optim.AdamW and is_torchs_own(sample)
    if not is_adamw:
        raise ConfigError(
            f"{name}: compiles the update of torch.optim.AdamW, and the optimizer is "
            f"{' and '.join(dict.fromkeys(groups.kinds))}; use AdamW, or leave {name} out"
        )
    if groups.state_dtype != torch.float32:
        raise ConfigError(
            f"{name}: its state is in fp32, and {argument('precision.state', 'bf16')} keeps it in bf16; leave one of "
            "the two out"
        )
    if on_host:
        raise ConfigError(f"{name}: the update runs on the host with offload.update=host; leave one of the two out")
    for group in groups.hyperparameters:
        _require_known(group)
    require_compiler()


def _require_known(group: Mapping[str, Any]) -> None:
    for option in _UNKNOWN:
        if group[option]:
            name = argument("zero.compiled_update", True)
            raise ConfigError(f"{name}: the compiled AdamW has no {option}={group[option]}; leave one of the two out")


def number_on(device: torch.device, number: float | torch.Tensor) -> torch.Tensor:
    """0-dim fp32 on the device, without a copy from the host that would be waited for."""
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float32)
    return torch.full((), number, dtype=torch.float32, device=device)


def update_span(
    state: dict[str, Any],
    group: Mapping[str, Any],
    target: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor | None,
    factor: torch.Tensor,
    is_off: torch.Tensor,
) -> None:
    """Update a span and its state.

    Args:
        state: as of torch.optim.AdamW; empty before the first step.
        group: the hyperparameters.
        target: the master weight.
        gradient: of any floating-point dtype.
        weight: what the model reads, of a narrower dtype; None where that is `target`.
        factor: 0-dim fp32, what the gradient is multiplied with.
        is_off: 0-dim fp32: 1 for a step that changes nothing, else 0.
    """
    _require_known(group)
    if not state:
        state["step"] = torch.zeros((), device=target.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(target), torch.zeros_like(target)
    if not device_of(target.device).holds_values:
        return
    state["step"] = state["step"].to(target.device)  # from a checkpoint of an optimizer that counted on the host
    count, update = _compiled(*map(float, (*group["betas"], group["eps"], group["weight_decay"])))
    with torch.no_grad():
        numbers = count(state["step"], number_on(target.device, group["lr"]), is_off)
        update(target, gradient, weight, state["exp_avg"], state["exp_avg_sq"], *numbers, factor, is_off)


@cache
def _compiled(
    beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[..., None]]:
    """Two compiled functions: one computes the numbers of a span, the other its elements. In one function the powers
    would be taken for each element."""

    def count(step: torch.Tensor, lr: torch.Tensor, is_off: torch.Tensor) -> tuple[torch.Tensor, ...]:
        num_steps = step.double() + 1  # 1 - 0.999 has few digits in fp32
        rate, root = lr / (1 - beta1**num_steps), (1 - beta2**num_steps).sqrt()
        step.copy_(torch.where(is_off != 0, step, num_steps.float()))
        return rate.float(), root.float(), 1 - lr * weight_decay

    def update(
        target: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        rate: torch.Tensor,
        root: torch.Tensor,
        decay: torch.Tensor,
        factor: torch.Tensor,
        is_off: torch.Tensor,
    ) -> None:
        stays = is_off != 0
        scaled = gradient.to(target.dtype) * factor
        average = exp_avg + (scaled - exp_avg) * (1 - beta1)
        average_sq = exp_avg_sq * beta2 + scaled * scaled * (1 - beta2)
        new = torch.where(stays, target, target * decay - rate * average / (average_sq.sqrt() / root + eps))
        exp_avg.copy_(torch.where(stays, exp_avg, average))
        exp_avg_sq.copy_(torch.where(stays, exp_avg_sq, average_sq))
        target.copy_(new)
        if weight is not None:
            weight.copy_(new)

    return torch.compile(count, fullgraph=True), torch.compile(update, dynamic=True, fullgraph=True)
