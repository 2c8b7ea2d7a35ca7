"""From a model to buckets: on every rank the same ones, with rank 0's values."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import SGD, Linears, Plain, alone, assert_same, engine_on, inputs, seeded, train
from zerotrain.comm.world import Shards, World
from zerotrain.engine.model.checks import require_values
from zerotrain.errors import ConfigError
from zerotrain.sharding.units import walk


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


def test_a_bucket_is_no_larger_than_asked_in_the_precision_that_is_sent() -> None:
    for precision, itemsize in (("fp32", 4), ("bf16", 2)):
        engine = engine_on(alone(), precision=precision, zero={"bucket_mb": 72 * itemsize / 2**20})
        numels = [bucket.layout.numel for bucket in engine.schedule.buckets]
        assert max(numels) == 72
        assert sum(numels) == engine.num_parameters


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


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = Linears()


class Buffered(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))


DIFFERENT = {
    "sizes": (Wider, {}, "the model"),
    "names": (Renamed, {}, "the model"),
    "buffers": (Buffered, {}, "buffers"),
    "rates": (Linears, {"optimizer": functools.partial(torch.optim.SGD, lr=0.25)}, "the optimizer"),
    "stages": (Linears, {"zero": {"stage": 1}}, "zero.stage"),
    "buckets": (Linears, {"zero": {"bucket_mb": 1.0}}, "zero.bucket_mb"),
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
def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="weight of model Linear is on the meta device"):
        require_values(walk(model), torch.device("cpu"))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_function_that_builds_the_model_gives_the_same_engine_as_the_model(stage: int) -> None:
    def on_a_rank(world: World) -> list[dict[str, torch.Tensor]]:
        engines = [engine_on(world, zero={"stage": stage})]
        zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=0.0003)
        torch.manual_seed(0)
        engines.append(zerotrain.build_engine(Linears, optimizer=SGD, zero=zero, world=world))
        for engine in engines:
            train(engine, 0)
            with torch.no_grad():
                engine(inputs(0, 0))
        return [engine.full_state_dict() for engine in engines]

    assert_same(*run_threads(on_a_rank, 1)[0][0])


class Unreadable(nn.Parameter):
    def detach(self) -> torch.Tensor:
        raise OSError(5, "Input/output error", "weights.bin")


def fail_in_the_constructor() -> nn.Module:
    raise FileNotFoundError(2, "No such file or directory", "vocab.json")


def fail_at_a_weight() -> nn.Module:
    model = seeded(Linears)
    model.last = nn.Module()
    model.last.weight = Unreadable(torch.ones(3))
    return model


def fail_by_a_kind_of_parameter() -> nn.Module:
    return seeded(Linears).double()


def fail_at_the_end() -> nn.Module:
    """Behind all collectives of a build, where an encoder's hook is registered."""
    model = seeded(Linears)
    model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
    model.encoder.register_forward_pre_hook = None
    return model


def other(make: Any) -> Any:
    """The same model for a rank that does not fail."""
    model = seeded(Linears)
    if make is fail_at_a_weight:
        model.last = nn.Module()
        model.last.weight = nn.Parameter(torch.ones(3))
    if make is fail_at_the_end:
        model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)
    return model


CAUSES = {
    fail_in_the_constructor: "vocab.json: No such file or directory",
    fail_at_a_weight: "weights.bin: Input/output error",
    fail_by_a_kind_of_parameter: "are fp64, and the engine trains fp32 weights at most",
    fail_at_the_end: "TypeError: 'NoneType' object is not callable",
}


@pytest.mark.case(
    "around_a_step",
    "a build that fails on one rank alone: in the function that builds the model, at rank 0's first values, at its end",
    "the first cause on all ranks, none of which waits; the next build works",
)
@pytest.mark.parametrize("fail", CAUSES)
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_fails_in_is_read_on_all_and_none_waits(fail: Any, failing: set[int], stage: int) -> None:
    if fail is fail_at_a_weight and 0 not in failing:
        failing = {0}  # whose values are used

    def on_a_rank(world: World) -> tuple[str, str]:
        make = fail if world.rank in failing else lambda: other(fail)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            zerotrain.build_engine(make, optimizer=SGD, zero=zerotrain.ZeroConfig(stage=stage), world=world)
        again = engine_on(world, zero={"stage": stage})
        train(again, 0)
        return str(raised.value), again.weights_sha256()

    ranks, _ = run_threads(on_a_rank, 3, late_rank=1)
    first = min(failing)
    for rank, (text, _) in enumerate(ranks):
        cause = CAUSES[fail].removeprefix("TypeError: ") if rank in failing else f"failed, rank {first}: "
        assert cause.split(": ")[-1] in text, rank
    assert len({sha256 for _, sha256 in ranks}) == 1
    assert all(text.endswith("; no rank has one") for rank, (text, _) in enumerate(ranks) if rank not in failing)
