"""The hooks on a model: what they announce, what they hold, and that they go with their engine."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Linears, assert_same, engine_on, inputs, seeded, train
from zerotrain.comm.world import World
from zerotrain.engine.schedule.hooks import LastGradientHook, connect, next_node, require_graph, require_no_engine
from zerotrain.engine.schedule.live_unit import LiveUnit
from zerotrain.errors import EngineStateError
from zerotrain.sharding.units import walk

# ---- the last gradient


def test_of_several_gradients_the_last_is_told_once_a_backward_whichever_it_is():
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    told: list[list[bool]] = []
    parameters = [first, second, third]
    LastGradientHook(parameters, lambda _: told.append([each.grad is not None for each in parameters]))
    for order in ((first, second, third), (third, second, first), (second, first, third), (third, first, second)):
        for _ in range(2):
            value = torch.ones(3)
            for parameter in order:
                value = value * parameter
            value.sum().backward()
            for parameter in parameters:
                parameter.grad = None
    assert told == [[True] * 3] * 8


# ---- announcements


class Told:
    """In the place of a schedule: writes down what it hears."""

    def __init__(self, model: nn.Module, *units: str) -> None:
        self.units = [LiveUnit(name, [model.get_submodule(name)], []) for name in units]
        self.trained: list[Any] = []
        self.buckets: list[Any] = []
        self.plan = SimpleNamespace(shards_parameters=True)
        self.heard: list[str] = []
        self.positions: list[tuple[int, int]] = []
        self.calls: list[Any] = []

    def before_forward(self, unit: LiveUnit, module: nn.Module) -> None:
        self.heard.append(f"{unit.name}(")

    def after_forward(self, unit: LiveUnit, module: nn.Module) -> None:
        self.heard.append(f"){unit.name}")

    def before_backward(self, unit: LiveUnit, call: Any, position: int, _: torch.Tensor) -> None:
        self.heard.append(f"<{unit.name}")
        self.positions.append((call.first_node, position))

    def keep(self, unit: LiveUnit) -> None:
        self.heard.append(f"keep {unit.name}")

    def drain(self) -> None:
        self.heard.append("drain")


class Owner:
    """Whose end takes the hooks off."""


def connected(model: nn.Module, *units: str) -> tuple[Told, Owner]:
    told, owner = Told(model, *units), Owner()
    connect(owner, told)  # type: ignore[arg-type]
    return told, owner


class Within(nn.Module):
    """Uses its weight before its layer; the layer fails in its second call, for which the module has an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.layer(x * self.gain)
        with pytest.raises(RuntimeError, match="shapes"):
            self.layer(x[:, :1])
        return inner * self.gain


def test_a_module_around_another_of_its_unit_begins_where_it_was_called():
    model = Within()
    told, owner = Told(model, ""), Owner()
    told.units[0].modules.append(model.layer)
    connect(owner, told)  # type: ignore[arg-type]
    before = next_node()
    model(torch.ones(1, 2)).sum().backward()
    assert told.heard == ["(", "(", ")", "(", ")", "<", "<"]
    assert told.positions[0][0] == before < told.positions[1][0]
    assert told.calls == []


def test_forwards_and_backwards_are_told_in_order_and_backwards_with_where_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    told, owner = connected(model, "0", "1")
    model(torch.ones(1, 2)).sum().backward()
    assert told.heard == ["0(", ")0", "1(", ")1", "<1", "<0"]
    (first_of_1, at_1), (first_of_0, at_0) = told.positions
    assert first_of_0 <= at_0 < first_of_1 <= at_1
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert told.heard[6:] == ["0(", ")0", "1(", ")1"]
    del owner


class Passing(nn.Module):
    """Gives its parameter away, or its input."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.gain, self.what = nn.Parameter(torch.ones(2)), what

    def forward(self, x: torch.Tensor) -> Any:
        if self.what == "parameter":
            return x * self.gain, self.gain
        if self.what == "aside":  # the last node made no output
            output = x * self.gain
            self.aside = output.square().sum()
            return output
        if self.what == "hidden":
            return SimpleNamespace(output=x * self.gain)
        return x * self.gain, x


@pytest.mark.parametrize(
    ("what", "is_kept"), [("parameter", True), ("aside", True), ("hidden", True), ("input", False)]
)
def test_a_unit_whose_backward_cannot_be_announced_in_time_is_kept(what, is_kept):
    model = nn.ModuleDict({"unit": Passing(what)})
    told, owner = connected(model, "unit")
    x = torch.ones(2, requires_grad=True) * 2
    model["unit"](x)
    assert ("keep unit" in told.heard) == is_kept
    del owner


def test_an_input_that_is_handed_on_announces_no_backward_of_the_unit():
    model = nn.ModuleDict({"unit": Passing("input")})
    told, owner = connected(model, "unit")
    _, same = model["unit"](torch.ones(2, requires_grad=True) * 2)
    same.sum().backward()
    assert "<unit" not in told.heard
    del owner


# ---- from the engine to its end


def test_without_its_owner_no_hook_is_left_and_what_is_under_way_was_waited_for():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    told, owner = connected(model, "0", "1")
    with pytest.raises(EngineStateError, match="has an engine already"):
        require_no_engine(walk(model))
    del owner
    assert told.heard == ["drain"]
    model(torch.ones(1, 2)).sum().backward()
    assert told.heard == ["drain"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    require_no_engine(walk(model))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_whose_engine_was_deleted_gets_another_that_goes_on_where_it_was(stage):
    def on_a_rank(world: World) -> list[dict[str, torch.Tensor]]:
        model = seeded(Linears)
        engine = engine_on(world, lambda: model, zero={"stage": stage})
        train(engine, 0)
        del engine
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        engine = engine_on(world, lambda: model, zero={"stage": stage})
        train(engine, 1)
        whole = engine_on(world, zero={"stage": stage})
        train(whole, 0, 1)
        return [engine.full_state_dict(), whole.full_state_dict()]

    assert_same(*run_threads(on_a_rank, 2)[0][0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_deleted_in_mid_step_leaves_no_rank_waiting_and_no_memory_behind(stage):
    def on_a_rank(world: World) -> bool:
        engine = engine_on(world, zero={"stage": stage})
        schedule = weakref.ref(engine.schedule)
        engine.backward(engine(inputs(0, world.rank)))
        engine.step()
        engine.backward(engine(inputs(0, world.rank)))
        del engine
        gc.collect()
        return schedule() is None

    assert run_threads(on_a_rank, 2, late_rank=1)[0] == [True, True]


# ---- losses


def test_a_loss_is_one_number_with_a_graph_that_is_not_older_than_the_weights():
    weight = nn.Parameter(torch.ones(3))
    old = weight.sum()
    first_node = next_node()
    require_graph(weight.sum(), first_node)
    require_graph(nn.Parameter(torch.ones(1)), first_node)  # a leaf is as old as its graph
    for loss, answer in (
        (old, "computed before the last step"),
        (weight * 1, r"a tensor of shape \(3,\)"),
        (3.0, "a float"),
        (torch.ones(()), "a loss without a graph"),
    ):
        with pytest.raises(EngineStateError, match=answer):
            require_graph(loss, first_node)  # type: ignore[arg-type]
