"""Optimizers that put other memory under a weight, or keep what they were given: as in plain PyTorch, bit for bit."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.groups.own_optimizers import Own, count
from tests.unit.engine.parts import Plain, alone, assert_same, engine_on, inputs
from zerotrain.comm.world import World
from zerotrain.engine.buckets.update import step_on_lent
from zerotrain.errors import ConfigError, EngineStateError


class Habit(Own):
    """Updates each weight by itself, by `update`."""

    update: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], object]

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    self.update(weight, 0.05 * weight.grad, self.state[weight])


def swap(weight: torch.Tensor, change: torch.Tensor, _: Any) -> None:
    new = weight - change
    torch.utils.swap_tensors(weight, torch.nn.Parameter(new) if isinstance(weight, torch.nn.Parameter) else new)


def mirror(weight: torch.Tensor, change: torch.Tensor, _: Any) -> None:
    """The same memory, read in another order."""
    weight.data = (weight - change).flip(0)
    weight.data = weight.data.flip(0)


def assign(weight: torch.Tensor, change: torch.Tensor, _: Any) -> None:
    weight.data = weight.data - change


def keep_old_weight(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    before, state["before"] = state.get("before", weight.data), weight.data
    weight.data = weight.data - change + 0.5 * (weight.data - before)


def copy_old_weight(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    before, state["before"] = state.get("before", weight.clone()), weight.clone()
    weight.copy_(weight - change + 0.5 * (weight - before))


def keep_gradient(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    before, state["before"] = state.get("before", weight.grad), weight.grad
    weight.sub_(change + 0.01 * before)


def copy_gradient(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    before, state["before"] = state.get("before", weight.grad.clone()), weight.grad.clone()
    weight.sub_(change + 0.01 * before)


def replace_gradient(weight: torch.Tensor, change: torch.Tensor, _: Any) -> None:
    weight.grad = weight.grad.clamp(-0.01, 0.01)
    weight.sub_(change + weight.grad)


def subtract(weight: torch.Tensor, change: torch.Tensor, _: Any) -> None:
    weight.sub_(change)


UPDATES: dict[str, tuple[Any, Any]] = {
    "assigned": (assign, subtract),
    "set_to": (lambda weight, change, _: weight.set_(weight - change), subtract),
    "swapped": (swap, subtract),
    "mirrored": (mirror, subtract),
    "old_weight_kept": (keep_old_weight, copy_old_weight),
    "gradient_kept": (keep_gradient, copy_gradient),
    "gradient_replaced": (
        replace_gradient,
        lambda weight, change, _: weight.sub_(change + weight.grad.clamp(-0.01, 0.01)),
    ),
}
"""Of each another one that does the same, and writes into the memory that it was given."""
CASES = [(name, (place + more) % 4, 1 + more % 3) for place, name in enumerate(UPDATES) for more in (1, 3)]


def optimizer_of(name: str, update: Any, *, whole: bool = False) -> type[Habit]:
    return type(name, (Habit,), {"update": staticmethod(update), "whole_tensor": whole})


@pytest.mark.case(
    "optimizers",
    "that puts other memory under a weight (`p.data = ...`, `p.set_`, "
    "`torch.utils.swap_tensors`), replaces `p.grad`, or keeps the gradient or the weight of a "
    "call",
    "same bits; another shape or dtype is refused",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "whole"])
@pytest.mark.parametrize(("update", "stage", "size"), CASES)
@pytest.mark.thinned(2)
def test_what_replaces_weights_or_keeps_gradients_trains_as_in_plain_pytorch(update, stage, size, whole, precision):
    def on_a_rank(world: World, kind: Any) -> dict[str, torch.Tensor]:
        zero = {"stage": stage, "reduction": "ordered"}
        engine = engine_on(world, optimizer=kind, zero=zero, precision=precision)
        for step in range(3):
            engine.train_step([(inputs(step, world.rank),)])
            if step == 1:
                engine.set_stage((stage + 1) % 4)
        return engine.full_state_dict()

    kind = optimizer_of(update, UPDATES[update][0], whole=whole)
    got = run_threads(functools.partial(on_a_rank, kind=kind), size, late_rank=size - 1)[0][0]
    if precision == "fp32":
        assert_same(got, Plain(size, optimizer=kind).train(0, 1, 2))
    else:
        in_place = run_threads(functools.partial(on_a_rank, kind=optimizer_of(update, UPDATES[update][1])), size)[0][0]
        assert_same(got, in_place)


# ---- a step by itself


def test_two_weights_that_exchange_memory_have_each_others_values_in_their_own():
    memory = torch.arange(8.0)
    left, right = memory[:4].detach(), memory[4:].detach()

    class Exchanges(Habit):
        def step(self, closure: Any = None) -> None:
            left.data, right.data = right.data, left.data

    step_on_lent(Exchanges([left, right]), [(left, torch.zeros(4)), (right, torch.zeros(4))])
    assert memory.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert (left.data_ptr(), right.data_ptr()) == (memory.data_ptr(), memory[4:].data_ptr())


def test_after_a_step_that_fails_weights_are_where_they_were_with_what_they_had_become():
    memory = torch.zeros(4)
    weight = memory.detach()

    class Fails(Habit):
        def step(self, closure: Any = None) -> None:
            weight.data = weight.data + 1
            raise KeyError

    with pytest.raises(KeyError):
        step_on_lent(Fails([weight]), [(weight, torch.zeros(4))])
    assert memory.tolist() == [1, 1, 1, 1]
    assert weight.data_ptr() == memory.data_ptr()
    assert weight.grad is None


# ---- another form


def narrowed(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    is_wide = count(state) > state.get("until", 0)
    weight.data = (weight - change).to(torch.float64 if is_wide else torch.float32)


def narrowed_late(weight: torch.Tensor, change: torch.Tensor, state: dict[str, Any]) -> None:
    state["until"] = 12
    narrowed(weight, change, state)


@pytest.mark.case(
    "optimizers",
    "that puts other memory under a weight (`p.data = ...`, `p.set_`, "
    "`torch.utils.swap_tensors`), replaces `p.grad`, or keeps the gradient or the weight of a "
    "call",
    under="an optimizer of your own, element by element",
)
def test_a_step_that_makes_a_weight_one_of_another_dtype_is_refused_at_the_build_or_in_that_step():
    with pytest.raises(ConfigError, match=r"optimizer=narrowed: its step fails on small tensors .*dtype"):
        engine_on(alone(), optimizer=optimizer_of("narrowed", narrowed))
    engine = engine_on(alone(), optimizer=optimizer_of("narrowed_late", narrowed_late))
    for step in range(12):
        engine.train_step([(inputs(step, 0),)])
    with pytest.raises(EngineStateError, match=r"optimizer=narrowed_late: .*torch\.float32 one of .*torch\.float64"):
        engine.train_step([(inputs(12, 0),)])
