"""Optimizers as users write them: some change each element by itself, most do not."""

from collections.abc import Callable
from typing import Any

import torch


class Own(torch.optim.Optimizer):
    """What `change` gives is subtracted from a weight, times the learning rate."""

    def __init__(self, params: Any, lr: float = 0.01, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [[each for each in group["params"] if each.grad is not None] for group in self.param_groups]
        self.begin([weight for weights in trained for weight in weights])
        for group, weights in zip(self.param_groups, trained, strict=True):
            for weight in weights:
                weight.sub_(group["lr"] * self.change(weight, weight.grad, group, self.state[weight]))

    def begin(self, weights: list[torch.Tensor]) -> None:
        pass

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient


def own(name: str, change: Any = None, begin: Any = None, **defaults: Any) -> type[Own]:
    """One of that name, by `change(weight, gradient, group, state)` and `begin(optimizer, weights)`."""
    members: dict[str, Any] = {} if change is None else {"change": staticmethod(change)}
    if begin is not None:
        members["begin"] = begin
    if defaults:
        members["__init__"] = lambda self, params, lr=0.01: Own.__init__(self, params, lr, **defaults)
    return type(name, (Own,), members)


def mean_of(state: Any, gradient: torch.Tensor, name: str = "mean") -> torch.Tensor:
    """The running mean of gradients that a weight's state has under this name."""
    return state.setdefault(name, torch.zeros_like(gradient)).lerp_(gradient, 0.1)


def count(counts: Any, name: str = "count") -> int:
    """Of calls, in a state or a group."""
    counts[name] = counts.get(name, 0) + 1
    return counts[name]


# ---- that fit


def momentum(weight: torch.Tensor, gradient: torch.Tensor, _: Any, state: Any) -> torch.Tensor:
    """Also writes into the gradient it is given, as clipping and weight decay often do."""
    gradient.add_(weight, alpha=0.1).clamp_(-1, 1)
    mean = mean_of(state, gradient)
    return mean.tanh().exp() * mean.sign() / count(state) ** 0.5


def adam_over_lists(optimizer: Any, weights: list[torch.Tensor]) -> None:
    """Adam's rule over lists of tensors, with a count of steps that is changed where it lies."""
    (group,) = optimizer.param_groups
    group.setdefault("step", torch.zeros(())).add_(1)
    gradients = [weight.grad for weight in weights]
    means = [optimizer.state[weight].setdefault("mean", torch.zeros_like(weight)) for weight in weights]
    torch._foreach_lerp_(means, gradients, 0.1)
    torch._foreach_copy_(gradients, torch._foreach_div(means, float(1 - 0.9 ** group["step"])))


def count_in_groups(name: str) -> Callable[[Any, Any], None]:
    return lambda optimizer, _: [count(group, name) for group in optimizer.param_groups]


Momentum = own("Momentum", momentum)
CountsInItsGroup = own(
    "CountsInItsGroup", lambda _, gradient, group, __: gradient / group["step"], count_in_groups("step")
)
# Has its number among its arguments, as those have it that average over steps.
CountsInATensor = own("CountsInATensor", begin=adam_over_lists)

# ---- that fit whole tensors


def in_blocks_of_8_bits(_: Any, gradient: torch.Tensor, *__: Any) -> torch.Tensor:
    """Leaves small tensors alone."""
    if gradient.numel() < 4096:
        return gradient
    blocks = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).view(-1)[: gradient.numel()].view(gradient.shape)


def project_sometimes(weight: torch.Tensor, gradient: torch.Tensor, _: Any, state: Any) -> torch.Tensor:
    """AdamP by another name: only a change that is orthogonal to its weight is projected."""
    mean = mean_of(state, gradient)
    flat, direction = mean.flatten(), weight.flatten() / weight.norm()
    cosine = (flat @ direction) / flat.norm()
    is_along = cosine.abs() > 0.1 / weight.numel() ** 0.5
    return mean if is_along else mean - (flat @ direction) * direction.view_as(mean)


def of_matrices_only(weight: torch.Tensor, gradient: torch.Tensor, *_: Any) -> torch.Tensor:
    if weight.ndim != 2:
        raise ValueError("takes matrices alone")
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    return left @ right


LayerwiseRate = own("LayerwiseRate", lambda weight, gradient, *_: 0.001 * weight.norm() / gradient.norm() * gradient)
OfUnitNorm = own("OfUnitNorm", lambda _, gradient, *__: gradient / gradient.norm())
# Looks at the shape alone: what is flat is left as it is.
Centred = own("Centred", lambda weight, g, *_: g if weight.ndim < 2 else g - g.mean(dim=-1, keepdim=True))
OnceInTen = own("OnceInTen", lambda _, g, __, state: g if count(state) % 10 else g / g.norm())
InBlocksOf8Bits = own("InBlocksOf8Bits", in_blocks_of_8_bits)
ProjectsSometimes = own("ProjectsSometimes", project_sometimes)
# A processor takes a power of many numbers at once by another rule than that of the last few.
RoundsByPlace = own("RoundsByPlace", lambda _, gradient, *__: gradient.abs().pow(0.24) * gradient.sign())
MatricesOnly = own("MatricesOnly", of_matrices_only)
OneNumberOfATensor = own(
    "OneNumberOfATensor", lambda _, g, __, state: g / float(state.setdefault("count", torch.zeros(1)).add_(1))
)

# ---- that fit nowhere


def guess_the_rate(optimizer: Any, weights: list[torch.Tensor]) -> None:
    """The number d of Prodigy and D-Adaptation, over all parameters."""
    gained, moved, distance = 0.0, 0.0, getattr(optimizer, "distance", 1e-6)
    for weight in weights:
        first = optimizer.state[weight].setdefault("first", weight.clone())
        total = optimizer.state[weight].setdefault("total", torch.zeros_like(weight))
        gained += float((weight.grad * (first - weight)).sum())
        moved += float(total.add_(weight.grad, alpha=distance).abs().sum())
    optimizer.distance = max(distance, gained / moved)
    for weight in weights:
        weight.grad.sign_().mul_(optimizer.distance)


def fail(*_: Any) -> None:
    raise KeyError("layers")


KeepsAWeight = own("KeepsAWeight", lambda _, gradient, __, state: mean_of(state, gradient, "weight"))
InAList = own("InAList", lambda _, g, __, state: state.setdefault("means", [torch.zeros_like(g)])[0].lerp_(g, 0.1))
DoesNothing = own("DoesNothing", lambda _, gradient, *__: torch.zeros_like(gradient))
ClipsAll = own("ClipsAll", begin=lambda _, weights: torch.nn.utils.clip_grad_norm_(weights, 1.0))
GuessesItsRate = own("GuessesItsRate", begin=guess_the_rate)
Langevin = own("Langevin", lambda _, gradient, *__: gradient + torch.randn_like(gradient))
Fails = own("Fails", begin=fail)
# As one does that looks back on steps before, and one that adds noise after a warm-up.


class WantsAClosure(Own):
    def step(self, closure: Callable[[], Any]) -> None:
        closure()


class Sharpness(Own):
    """SAM: the closure may be left out, says its signature alone."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"
        closure()
