"""Optimizers as users write them, by where they keep what later steps need."""

import logging
from typing import Any

import torch
from torch import nn

from tests.unit.engine.groups.own_optimizers import Own, count, own

AdamW = torch.optim.AdamW

# ---- elsewhere than in their state


def by(key: Any, momenta: dict[Any, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    return momenta.setdefault(key, torch.zeros_like(gradient)).lerp_(gradient, 0.1)


class ByParameter(Own):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta: dict[Any, torch.Tensor] = {}

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return by(weight, self.momenta, gradient)


class MadeWithIt(Own):
    """A list beside the parameters, made before the first step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta = [torch.zeros_like(weight) for group in self.param_groups for weight in group["params"]]

    def begin(self, weights: list[torch.Tensor]) -> None:
        for momentum, weight in zip(self.momenta, weights, strict=True):
            momentum.lerp_(weight.grad, 0.1)
            weight.grad.copy_(momentum)


class Average(Own):
    """Trains as if it were not there, and would begin anew after a change of stage."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.average = [weight.clone() for group in self.param_groups for weight in group["params"]]

    def step(self, closure: Any = None) -> None:
        super().step()
        for average, weight in zip(self.average, self.param_groups[0]["params"], strict=True):
            average.lerp_(weight, 0.1)


class Counts(Own):
    """Adam's correction of its bias, by a number for all."""

    num_steps = 0

    def begin(self, weights: list[torch.Tensor]) -> None:
        self.num_steps += 1

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return by("mean", state, gradient) / (1 - 0.9**self.num_steps)


class Around(torch.optim.Optimizer):
    """One optimizer around another, as Lookahead is."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        self.inner = AdamW(params, lr=lr)
        super().__init__(self.inner.param_groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.inner.param_groups = self.param_groups
        self.inner.step()


def on_the_parameter(weight: Any, gradient: torch.Tensor, *_: Any) -> torch.Tensor:
    weight.momentum = getattr(weight, "momentum", 0) * 0.9 + gradient
    return weight.momentum


OnTheParameter = own("OnTheParameter", on_the_parameter)
# Follows the weight, as long as that lies where it is.
InStateOfNoParameter = own("InStateOfNoParameter", begin=lambda optimizer, _: count(optimizer.state["all"]))


# ---- in their state, with what else users hang on an optimizer


_MODEL = nn.Linear(2, 2)


class Busy(AdamW):
    """Counts, times, looks and logs, and computes in a buffer of its own."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr=lr)
        self.num_calls, self.norms = 0, [0.0]
        self.last_norm = torch.zeros(())
        self.buffers: dict[torch.Size, torch.Tensor] = {}
        self.log, self.model = logging.getLogger("busy"), _MODEL
        self.itself = self

    def step(self, closure: Any = None) -> None:
        self.num_calls += 1
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                buffer = self.buffers.setdefault(weight.shape, torch.empty_like(weight))
                self.last_norm = torch.mul(weight.grad, weight.grad, out=buffer).sum().sqrt()
                self.norms.append(float(self.last_norm))
        super().step()


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = AdamW(params, lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_a_tensor_rate(params: Any) -> torch.optim.Optimizer:
    return Busy(params, lr=torch.tensor(0.01))


def clipping_all(params: Any) -> torch.optim.Optimizer:
    """One of torch's own, with a hook that no shard can run."""
    optimizer = AdamW(params, lr=0.01)

    def clip(the: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([weight for group in the.param_groups for weight in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer
