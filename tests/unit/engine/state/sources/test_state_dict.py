"""Full weights into the shards of any stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import Linears, assert_same, engine_on, seeded
from tests.unit.engine.parts import train as train_engine
from zerotrain.comm.world import World
from zerotrain.testing.fake_wire import run_threads


class Kept(Linears):
    """With a tied and a frozen layer, a buffer, an integer, and a number beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("offset", torch.zeros(3))
        self.extra = "old"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset.to(x.dtype))


EVERYWHERE = pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, precision) for stage in range(4) for size in (1, 2, 3) for precision in ("fp32", "bf16")],
)


@pytest.mark.case(
    "around_a_step",
    "`engine.load_state_dict(full)`",
    "loads rank 0's dict at every stage; names and shapes are checked before anything changes",
)
@EVERYWHERE
@pytest.mark.thinned(5)
def test_what_was_taken_out_trains_on_to_the_same_bits_in_another_engine(stage: int, size: int, precision: str) -> None:
    def on_a_rank(world: World) -> list[str]:
        one = engine_on(world, Kept, zero={"stage": stage}, precision=precision)
        one.module.offset.fill_(0.5)
        one.module.extra = "new"
        train_engine(one, 0, 1)
        taken = one.full_state_dict() | ({"_extra_state": "new"} if world.rank == 0 else {})
        other = engine_on(world, Kept, zero={"stage": (stage + 2) % 4}, precision=precision)
        train_engine(other, 5)
        other.load_state_dict(taken)
        assert other.module.extra == "new"
        assert other.module.offset.tolist() == [0.5] * 3
        hashes = [one.weights_sha256(), other.weights_sha256()]
        for engine in (one, other):
            train_engine(engine, 2)
        return [*hashes, one.weights_sha256(), other.weights_sha256()]

    for before, loaded, after, trained in run_threads(on_a_rank, size, late_rank=size - 1)[0]:
        assert (before, after) == (loaded, trained)
        assert before != after


@pytest.mark.parametrize("stage", range(4))
def test_what_is_not_given_stays(stage: int) -> None:
    def on_a_rank(world: World) -> dict[str, Any]:
        engine = engine_on(world, Kept, zero={"stage": stage})
        given = {"blocks.3.weight": torch.ones(8, 8), "output.bias": torch.full((5,), 2.0), "unknown": torch.ones(1)}
        engine.load_state_dict(given if world.rank == 0 else {}, strict=False)
        return engine.full_state_dict()

    got = run_threads(on_a_rank, 2)[0][0]
    expected = dict(seeded(Kept).named_parameters())
    changed = {"blocks.0.weight": torch.ones(8, 8), "output.bias": torch.full((5,), 2.0)}
    assert_same({name: got[name] for name in expected}, {n: p.detach() for n, p in expected.items()} | changed)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (without("input.bias"), r"load_state_dict: input\.bias missing"),
    "unknown": (lambda state: state | {"head.weight": torch.ones(1)}, r"the model has no head\.weight"),
    "shape": (lambda state: state | {"input.bias": torch.ones(3)}, r"input\.bias is of shape \(3,\), and the model's"),
}


@pytest.mark.case("around_a_step", "`engine.load_state_dict(full)`")
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_has_changed(case: str) -> None:
    change, answer = REFUSED[case]

    def on_a_rank(world: World) -> None:
        engine = engine_on(world, zero={"stage": 2})
        before = engine.weights_sha256()
        state = {name: value + 1 for name, value in seeded(Linears).state_dict().items()}
        with pytest.raises(zerotrain.ConfigError, match=answer):
            engine.load_state_dict(change(state) if world.rank == 0 else {})
        assert engine.weights_sha256() == before
        train_engine(engine, 0)

    run_threads(on_a_rank, 2)


def test_while_a_gradient_waits_nothing_is_loaded_and_a_loss_from_before_is_refused() -> None:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    engine = engine_on(world)
    state = engine.full_state_dict()
    loss = engine(torch.ones(1, 3))
    engine.load_state_dict(state)
    with pytest.raises(zerotrain.EngineStateError, match="computed before"):
        engine.backward(loss)
    engine.backward(engine(torch.ones(1, 3)))
    with pytest.raises(zerotrain.EngineStateError, match="cannot be loaded while a gradient waits"):
        engine.load_state_dict(state)
    engine.step()


def test_a_model_with_state_beside_its_parameters_alone_is_loaded_as_plain_pytorch_does() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    engine = zerotrain.build_engine(model, optimizer=torch.optim.SGD)
    state = model.state_dict()
    state["1.running_mean"] = torch.full((3,), 7.0)
    state["1.num_batches_tracked"] = torch.tensor(9)
    engine.load_state_dict(state)
    assert model[1].running_mean.tolist() == [7.0] * 3
    assert model[1].num_batches_tracked.item() == 9
