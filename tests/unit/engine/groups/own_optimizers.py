"""Optimizers as users write them: some change each element by itself, most do not."""

import random
import time
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


class Momentum(Own):
    """Also writes into the gradient it is given, as clipping and weight decay often do."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        gradient.add_(weight, alpha=0.1).clamp_(-1, 1)
        state["count"] = state.get("count", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(weight)).lerp_(gradient, 0.1)
        return mean.tanh().exp() * mean.sign() / state["count"] ** 0.5


class KeepsAGradient(Own):
    """What it keeps has a name that the engine may have too."""

    name = "gradient"

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return state.setdefault(self.name, torch.zeros_like(weight)).lerp_(gradient, 0.1)


class KeepsAWeight(KeepsAGradient):
    name = "weight"


class KeepsAnAverage(KeepsAGradient):
    name = "weight_average"


class CountsInItsGroup(Own):
    def begin(self, weights: list[torch.Tensor]) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient / group["step"]


class CountsFromTheStart(Own):
    """Has its number among its arguments, as those have it that average over steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, k=0)

    def begin(self, weights: list[torch.Tensor]) -> None:
        for group in self.param_groups:
            group["k"] += 1

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient / group["k"]


class CountsInATensor(Own):
    """Adam's rule over lists of tensors, with a count of steps that is changed where it lies."""

    def begin(self, weights: list[torch.Tensor]) -> None:
        (group,) = self.param_groups
        group.setdefault("step", torch.zeros(())).add_(1)
        gradients = [weight.grad for weight in weights]
        means = [self.state[weight].setdefault("mean", torch.zeros_like(weight)) for weight in weights]
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_copy_(gradients, torch._foreach_div(means, float(1 - 0.9 ** group["step"])))


class LayerwiseRate(Own):
    """LARS by another name."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return 0.001 * weight.norm() / gradient.norm() * gradient


class LayerwiseAdam(Own):
    """LAMB by another name."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        mean = state.setdefault("mean", torch.zeros_like(weight)).lerp_(gradient, 0.1)
        square = state.setdefault("square", torch.zeros_like(weight)).lerp_(gradient.square(), 0.01)
        update = mean / (square.sqrt() + 1e-6)
        return weight.norm() / update.norm() * update


class OfUnitNorm(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient / gradient.norm()


class ClipsEachTensor(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient * min(1.0, 10.0 / float(gradient.norm()))


class SignOfTheMean(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient.mean().sign()


class Centred(Own):
    """Looks at the shape alone: what is flat is left as it is."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient if weight.ndim < 2 else gradient - gradient.mean(dim=-1, keepdim=True)


class OnceInTen(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        state["count"] = state.get("count", 0) + 1
        return gradient if state["count"] % 10 else gradient / gradient.norm()


class MatricesOnly(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        if weight.ndim != 2:
            raise ValueError("takes matrices alone")
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ right


class InBlocksOf8Bits(Own):
    """Leaves small tensors alone."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        if gradient.numel() < 4096:
            return gradient
        blocks = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127
        return ((blocks / scale).round() * scale).view(-1)[: gradient.numel()].view(gradient.shape)


class ProjectsSometimes(Own):
    """AdamP by another name: only a change that is orthogonal to its weight is projected."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        mean = state.setdefault("mean", torch.zeros_like(weight)).lerp_(gradient, 0.1)
        flat, direction = mean.flatten(), weight.flatten() / weight.norm()
        cosine = (flat @ direction) / flat.norm()
        return (
            mean if cosine.abs() > 0.1 / weight.numel() ** 0.5 else mean - (flat @ direction) * direction.view_as(mean)
        )


class RoundsByPlace(Own):
    """A processor takes a power of many numbers at once by another rule than that of the last few."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient.abs().pow(0.24) * gradient.sign()


class OneNumberOfATensor(Own):
    """What it keeps is one number, of one dimension."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        count = state.setdefault("count", torch.zeros(1)).add_(1)
        return gradient / float(count)


class InBlocks(Own):
    """Keeps what it needs of each element, in rows of four."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        rows = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 4)).view(-1, 4)
        mean = state.setdefault("mean", torch.zeros_like(rows)).lerp_(rows, 0.1)
        return mean.flatten()[: gradient.numel()].view_as(gradient)


class InAList(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return state.setdefault("means", [torch.zeros_like(weight)])[0].lerp_(gradient, 0.1)


class DoesNothing(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return torch.zeros_like(gradient)


class NeedsTheGraph(Own):
    """A second derivative: of parameters alone, as ranks hold no parameters to derive by."""

    def begin(self, weights: list[torch.Tensor]) -> None:
        derived = [weight for weight in weights if weight.requires_grad]
        if derived:
            torch.autograd.grad([weight.grad for weight in derived], derived, [weight.grad for weight in derived])


class ClipsAll(Own):
    def begin(self, weights: list[torch.Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)


class GuessesItsRate(Own):
    """The number d of Prodigy and D-Adaptation, over all parameters."""

    distance = 1e-6

    def begin(self, weights: list[torch.Tensor]) -> None:
        gained, moved = 0.0, 0.0
        for weight in weights:
            first = self.state[weight].setdefault("first", weight.clone())
            total = self.state[weight].setdefault("total", torch.zeros_like(weight))
            gained += float((weight.grad * (first - weight)).sum())
            moved += float(total.add_(weight.grad, alpha=self.distance).abs().sum())
        self.distance = max(self.distance, gained / moved)

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return self.distance * gradient.sign()


class CountsTensorsInItsGroup(Own):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, k=0)

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        group["k"] += 1
        return gradient / group["k"]


class Langevin(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class PythonsNoise(Own):
    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return gradient * random.Random(time.perf_counter_ns()).random()


class WantsAClosure(Own):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()


class GoesBackward(Own):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure().backward()


class Sharpness(Own):
    """SAM: the closure may be left out, says its signature alone."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"
        closure()


class Fails(Own):
    def begin(self, weights: list[torch.Tensor]) -> None:
        raise KeyError("layers")


class FailsLater(Own):
    """As one does that looks back on steps before."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        state["count"] = state.get("count", 0) + 1
        return gradient if state["count"] < 4 else gradient * {}["rate"]


class DrawsLater(Own):
    """As one does that adds noise after a warm-up."""

    def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        state["count"] = state.get("count", 0) + 1
        return gradient if state["count"] < 4 else gradient + torch.randn_like(gradient)
