"""A refusal leaves the engine what it was, on ranks that are threads. More calls: distributed/test_refusals.py."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import alone, engine_on, inputs, on_ranks, train
from zerotrain.errors import CommError, ConfigError, DisagreementError, EngineStateError


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_one_rank_wrote_into_its_weights_is_refused_until_all_have_the_same(world, stage):
    """The first refusal forgot it, and the next step trained other weights on each rank (2026-11-23)."""
    engine = engine_on(world, zero={"stage": stage})
    train(engine, 0)
    with torch.no_grad(), engine.forward_scope():
        engine.module.output.bias.fill_(float(world.rank))
    with pytest.raises(ConfigError, match="weights written in place, as a hash differs between the ranks"):
        engine.set_stage(1)
    engine.backward(engine(inputs(1, world.rank)))
    for _ in range(2):
        with pytest.raises(DisagreementError, match="weights written in place, as a hash: "):
            engine.step()


@on_ranks(2)
def test_weights_that_cannot_be_read_are_named_before_any_is_taken(world):
    engine = engine_on(world, zero={"stage": 3})
    before = engine.weights_sha256()
    full = engine.full_state_dict()
    sparse = torch.zeros(5).to_sparse()
    wrong = {"output.bias": sparse, "input.bias": [0.0] * 8, "blocks.0.bias": torch.zeros(8, device="meta")}
    with pytest.raises(ConfigError) as error:
        engine.load_state_dict(full | wrong)
    for words in (
        "input.bias is a list",
        "output.bias is a torch.sparse_coo tensor on cpu",
        "blocks.0.bias is a torch.strided tensor on meta",
    ):
        assert words in str(error.value)
    assert engine.weights_sha256() == before


class Making:
    """Makes an optimizer, until there is no room left for one."""

    num_left = 1000

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self.num_left -= 1
        if self.num_left < 0:
            raise MemoryError("no room for a bucket")
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


FAILING: dict[str, Callable[[zerotrain.ZeroEngine, Path], object]] = {
    "freeze": lambda engine, _: engine.freeze("input.*"),
    "unfreeze": lambda engine, _: engine.unfreeze("output.*"),
    "add_param_group": lambda engine, _: engine.add_param_group({"params": ["output.*"], "name": "new"}),
    "set_stage": lambda engine, _: engine.set_stage(engine.options.zero.stage ^ 1),
    "load": lambda engine, folder: engine.load(folder),
    "averaged": lambda engine, _: fail_within(engine.averaged()),
}
LATER: dict[str, Callable[[zerotrain.ZeroEngine, Path], object]] = {
    "call": lambda engine, _: engine(inputs(0, 0)),
    "forward_scope": lambda engine, _: engine.forward_scope().__enter__(),
    "backward": lambda engine, _: engine.backward(torch.zeros(())),
    "step": lambda engine, _: engine.step(),
    "train_step": lambda engine, _: engine.train_step([(inputs(0, 0),)]),
    "leaf": lambda engine, _: engine.leaf(0, [(inputs(0, 0),)]),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "keep_average": lambda engine, _: engine.keep_average(),
    "save": lambda engine, folder: engine.save(folder / "another"),
    "load_weights": lambda engine, folder: engine.load_weights(folder),
    "load_state_dict": lambda engine, _: engine.load_state_dict({}, strict=False),
    "full_state_dict": lambda engine, _: engine.full_state_dict(),
    "weights_sha256": lambda engine, _: engine.weights_sha256(),
    "memory_bytes": lambda engine, _: engine.memory_bytes(),
    "the model": lambda engine, _: engine.module(inputs(0, 0)),
    "its state_dict": lambda engine, _: engine.module.state_dict(),
    "a parameter": lambda engine, _: engine.module.output.weight.data,
    **FAILING,
}


def fail_within(context: AbstractContextManager[None]) -> None:
    with context:
        raise CommError("rank 7 is gone")


@pytest.mark.case(
    "calls: Calls",
    "`freeze`, `unfreeze`, `add_param_group`, `set_stage` or `load` fails halfway: no memory, a disk, another rank",
    "each later call of the engine, and each look at a weight, raises EngineStateError with the first cause",
)
@pytest.mark.parametrize("call", FAILING)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_change_that_fails_leaves_all_as_it_was_or_each_later_call_tells_of_it(stage, call, tmp_path):
    def on_a_rank(world: zerotrain.World, num_left: int) -> list[str]:
        making = Making()
        engine = engine_on(world, optimizer=making, zero={"stage": stage})
        engine.keep_average()
        train(engine, 0)
        engine.save(tmp_path / f"saved after {num_left}")
        engine.freeze("output.*")
        train(engine, 1)
        before = engine.weights_sha256()
        making.num_left = num_left
        with pytest.raises((MemoryError, CommError)):
            FAILING[call](engine, tmp_path / f"saved after {num_left}")
        making.num_left = 1000
        said = []
        for later in LATER.values():
            try:
                assert engine.weights_sha256() == before
                train(engine, 2)
                return ["as it was"]
            except EngineStateError:
                with pytest.raises(EngineStateError) as raised:
                    later(engine, tmp_path / f"saved after {num_left}")
                said.append(str(raised.value))
        return said

    cause = "rank 7 is gone" if call == "averaged" else "MemoryError: no room for a bucket"
    broken = (
        f"engine.{call} has failed halfway ({cause}), and the engine holds a part of it: build the model and its "
        "engine anew, and load the last checkpoint"
    )
    size = 1 if stage else 2  # where each has all, all fail at one place
    said = [run_threads(functools.partial(on_a_rank, num_left=num_left), size)[0][0] for num_left in (0, 3)]
    assert all(set(each) in ({broken}, {"as it was"}) for each in said), said
    assert {broken} in [set(each) for each in said]


@pytest.mark.case(
    "parameters",
    "`requires_grad` changed without a call of the engine",
    "refused in the next backward, with the call to make",
)
@pytest.mark.parametrize("stage", [0, 3])
def test_all_frozen_by_hand_is_told_with_the_call_to_make(stage):
    """The loss has no graph then, which the engine took for one under torch.no_grad()."""
    engine = engine_on(alone(), zero={"stage": stage})
    engine.module.requires_grad_(False)
    with pytest.raises(EngineStateError, match=r"^requires_grad of input.weight was set to False after build_engine; "):
        train(engine, 0)
    engine.module.requires_grad_(True)
    train(engine, 1)


class Table(nn.Module):
    """Rows of a matrix, whose gradient has those rows alone if it is asked for so."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(9, 3))
        self.output = nn.Linear(3, 1)

    def forward(self, way: str, is_sparse: bool) -> torch.Tensor:
        numbers = torch.tensor([[1, 2, 1]])
        read = {
            "embedding": lambda: F.embedding(numbers, self.rows, sparse=is_sparse),
            "embedding_bag": lambda: F.embedding_bag(numbers, self.rows, mode="sum", sparse=is_sparse),
            "gather": lambda: self.rows.gather(0, numbers, sparse_grad=is_sparse),
        }[way]()
        return self.output(read).float().square().mean()


@pytest.mark.case(
    "models: Models and optimizers",
    "`F.embedding(sparse=True)`, `F.embedding_bag` and `torch.gather(sparse_grad=True)` of a parameter",
    "refused in the backward, with the parameter's name; nothing of the step is left",
)
@pytest.mark.parametrize("way", ["embedding", "embedding_bag", "gather"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_sparse_gradient_is_refused_by_name_and_leaves_nothing(stage, way):
    engines = [engine_on(alone(), Table, zero={"stage": stage}) for _ in range(2)]
    with pytest.raises(
        EngineStateError, match=r"^the gradient of rows is sparse, and buckets hold dense ones: in the "
    ):
        engines[0].backward(engines[0](way, True))
    for engine in engines:
        engine.backward(engine(way, False))
        engine.step()
    assert engines[0].weights_sha256() == engines[1].weights_sha256()
