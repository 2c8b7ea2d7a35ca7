"""The engine as torch's learning rate schedulers and loops written for torch see it."""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zerotrain.engine.results import StepResult
from zerotrain.errors import EngineStateError


class EngineOptimizer(torch.optim.Optimizer):
    """The `engine.optimizer`: a `torch.optim.Optimizer` whose groups are those of `engine.param_groups`.

    It updates nothing itself, and does not keep its engine alive.

    Args:
        steps: the engine's `Steps`.
        held: its `ShardedModel`. Schedulers of momentum look at the settings of its optimizers.
    """

    def __init__(self, steps: Any, held: Any) -> None:
        super().__init__([torch.zeros(0)], dict(held.groups.defaults))  # it must have a parameter, which is forgotten
        self.param_groups = held.groups.hyperparameters
        self._steps, self._held = weakref.ref(steps), weakref.ref(held)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """`engine.step()`.

        Raises:
            EngineStateError: there is a closure.
        """
        if closure is not None:
            raise EngineStateError("step takes no closure here; call engine.backward(loss) before it")
        result: StepResult = _living(self._steps).step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`engine.zero_grad()`: before a backward and after a step there is nothing to forget."""
        _living(self._steps).zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`engine.add_param_group`."""
        if hasattr(self, "_held"):
            _living(self._held).add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Refused.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError(
            "engine.optimizer has no state dict: its state is sharded over the ranks, and engine.save(path) saves it "
            "with the weights; a scheduler's state is in its own state_dict()"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refused, as `state_dict`.

        Raises:
            EngineStateError: always.
        """
        self.state_dict()

    def told_of_step(self) -> None:
        """The engine has made a step: torch's schedulers warn of those who schedule without."""
        self._opt_called = True


def _living(part: "weakref.ref[Any]") -> Any:
    """A part of the engine, which has it alone."""
    alive = part()
    if alive is None:
        raise EngineStateError("the engine of this optimizer is gone; keep it as long as you train")
    return alive
