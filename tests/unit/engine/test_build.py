"""From a model to buckets: on every rank the same ones, with rank 0's values."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.parts import Linears, Plain, assert_same, engine_on, seeded, train
from zerotrain.comm.world import Shards, World
from zerotrain.engine.model.checks import require_values
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.sharding.units import walk
from zerotrain.testing.fake_wire import run_threads


class Apart(Linears):
    """Other values on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.data += rank
        self.register_buffer("table", torch.full((3,), float(rank)))
        self.register_buffer("mask", torch.tensor([rank == 0]))
        self.phase = nn.Parameter(torch.full((2,), complex(rank, 1)), requires_grad=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_begins_with_the_weights_and_the_buffers_of_rank_0(stage: int, precision: str) -> None:
    def on_a_rank(world: World) -> tuple[str, dict[str, torch.Tensor], list[Any]]:
        engine = engine_on(world, lambda: Apart(world.rank), precision=precision, zero={"stage": stage})
        module: Any = engine.module
        others = [module.table.tolist(), module.mask.tolist(), module.phase.tolist()]
        return engine.weights_sha256(), engine.full_state_dict(), others

    ranks, _ = run_threads(on_a_rank, 3)
    assert len({sha256 for sha256, _, _ in ranks}) == 1
    assert [others for _, _, others in ranks] == [[[0.0] * 3, [True], [1j, 1j]]] * 3
    assert_same(ranks[0][1], seeded(lambda: Apart(0)).state_dict())
    assert [state for _, state, _ in ranks[1:]] == [{}, {}]


def test_a_layout_is_cut_over_the_ranks_that_share_the_shards_not_over_the_world() -> None:
    engine = engine_on(World(rank=1, size=4, local_rank=1, device=torch.device("cpu"), shards=Shards(0, 1)))
    assert {bucket.layout.num_shards for bucket in engine.schedule.buckets} == {1}


class Tied(Linears):
    """Two blocks with one weight; and one weight that its own module does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.linear(x, self.blocks[3].weight[:3, :3]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_weight_is_one_with_two_names_and_what_is_read_without_a_call_is_there(stage: int) -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, Tied, zero={"stage": stage})
        train(engine, 0, 1)
        return engine.full_state_dict()

    plain = Plain(2, Tied)
    plain.train(0, 1)
    assert_same(run_threads(on_a_rank, 2)[0][0], plain.model.state_dict())


class Wider(Linears):
    width = 9


class Buffered(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))


DIFFERENT = {
    "sizes": (Wider, {}, "the model"),
    "buffers": (Buffered, {}, "buffers"),
    "rates": (Linears, {"optimizer": functools.partial(torch.optim.SGD, lr=0.25)}, "the optimizer"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_are_given_different_things_are_all_told_so(what: str) -> None:
    make, settings, answer = DIFFERENT[what]

    def on_a_rank(world: World) -> str:
        mine: Any = (make, settings) if world.rank == 1 else (Linears, {})
        with pytest.raises(ConfigError) as error:
            engine_on(world, mine[0], **mine[1])
        return str(error.value)

    for said in run_threads(on_a_rank, 3)[0]:
        assert answer in said
        assert "on ranks 0, 2" in said


@pytest.mark.case("models: Models and optimizers", "a model on the meta device", "refused")
def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="weight of model Linear is on the meta device"):
        require_values(walk(model), torch.device("cpu"))


@pytest.mark.parametrize("failing", [{1}, {0, 2}])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_build_that_fails_at_its_end_is_read_on_all_ranks_and_none_waits(failing: set[int], stage: int) -> None:
    """Behind all collectives of a build, where an encoder's hook is registered."""

    def on_a_rank(world: World) -> tuple[str, str]:
        model = seeded(Linears)
        model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
        if world.rank in failing:
            model.encoder.register_forward_pre_hook = None
        with pytest.raises((TypeError, EngineStateError)) as raised:
            engine_on(world, lambda: model, zero={"stage": stage})
        again = engine_on(world, zero={"stage": stage})
        train(again, 0)
        return str(raised.value), again.weights_sha256()

    ranks, _ = run_threads(on_a_rank, 3, late_rank=1)
    cause = "'NoneType' object is not callable"
    for rank, (text, _) in enumerate(ranks):
        other = f"building the engine failed, rank {min(failing)}: TypeError: {cause}; no rank has one"
        assert text == (cause if rank in failing else other)
    assert len({sha256 for _, sha256 in ranks}) == 1
