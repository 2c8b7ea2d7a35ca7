"""Functions of a user that call the engine, under `torch.compile`: the graph ends before each call, and it trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.engine.habits import build
from tests.unit.engine.parts import alone
from zerotrain.comm.world import World

Step = Callable[[torch.Tensor], Any]


def around_forward(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    loss_of = compiled(lambda x: engine(x).square().mean())
    return lambda x: (engine.backward(loss_of(x)), engine.step())


def around_several(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    loss_of = compiled(lambda x: (0.5 * engine(x) + 0.5 * engine(x.clone())).square().mean())
    return lambda x: (engine.backward(loss_of(x)), engine.step())


def of_the_engine(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    called = compiled(engine)
    return lambda x: (engine.backward(called(x).square().mean()), engine.step())


def around_forward_scope(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with engine.forward_scope():
            output = engine.module(x)
        return output.square().mean()

    whole = compiled(loss_of)
    return lambda x: (engine.backward(whole(x)), engine.step())


def around_all(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        engine.optimizer.zero_grad()
        with engine.no_sync():
            engine.backward(0.5 * engine(x).square().mean())
        engine.backward(0.5 * engine(x).square().mean())
        return engine.step()

    return compiled(step)


def around_changes(engine: zerotrain.ZeroEngine, compiled: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        engine.freeze("last.bias")
        engine.unfreeze("last.bias")
        engine.backward(engine(x).square().mean())
        engine.step()
        return engine.set_stage(3 - engine.options.zero.stage)

    return compiled(step)


PLACES = [around_forward, around_several, of_the_engine, around_forward_scope, around_all, around_changes]


def trained(world: World, stage: int, place: Any, compiled: Any) -> dict[str, torch.Tensor]:
    engine = build(world, stage, "fp32")
    step = place(engine, compiled)
    for number in range(2):
        step(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + world.rank)))
    return engine.full_state_dict()


@pytest.mark.case(
    "around_a_step",
    "`torch.compile` of the engine, or of a function that calls the engine",
    "trains as it is: the graph ends before each call; with `fullgraph=True` refused, with the reason",
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.thinned(2)
def test_a_compiled_function_that_calls_the_engine_trains_as_one_that_is_not(place, stage):
    torch._dynamo.reset()
    plain = trained(alone(), stage, place, lambda function: function)
    for name, value in trained(alone(), stage, place, lambda f: torch.compile(f, backend="aot_eager")).items():
        torch.testing.assert_close(value, plain[name])


@pytest.mark.case("around_a_step", "`torch.compile` of the engine, or of a function that calls the engine")
def test_where_the_graph_must_not_end_the_reason_is_told():
    torch._dynamo.reset()
    engine = build(alone(), 3, "fp32")
    whole = torch.compile(lambda x: engine(x).square().mean(), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an engine gathers, reduces and updates between graphs"):
        whole(torch.zeros(4, 8))
