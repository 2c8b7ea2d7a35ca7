"""What trains is changed: values and the optimizer's state move to the new buckets with their parameters."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, inputs, train
from zerotrain.comm.ranks.world import World
from zerotrain.errors import EngineStateError
from zerotrain.testing.fake_wire import run_threads

MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.05, fused=False)
CHANGED = ["blocks.1.weight", "blocks.1.bias", "output.bias"]


def plainly(optimizer: Any) -> dict[str, torch.Tensor]:
    """Two steps of all, two of all but `CHANGED`, two of all again, in which those are new to the optimizer."""
    plain = Plain(2, optimizer=optimizer)
    plain.train(0, 1)
    for name in CHANGED:
        plain.parameters[name].requires_grad_(False)
        del plain.optimizer.state[plain.parameters[name]]
    plain.train(2, 3)
    for name in CHANGED:
        plain.parameters[name].requires_grad_(True)
    return plain.train(4, 5)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("bucket_mb", [0.0003, 0.002])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_stays_keeps_its_momentum_and_its_count_and_what_comes_back_begins_anew(
    stage: int, bucket_mb: float, optimizer: Any
) -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        zero = {"stage": stage, "bucket_mb": bucket_mb}
        groups = [{"params": ["*"], "weight_decay": optimizer([torch.zeros(1)]).defaults["weight_decay"]}]
        engine = engine_on(world, optimizer=optimizer, zero=zero, param_groups=groups)
        train(engine, 0, 1)
        engine.freeze(*CHANGED)
        train(engine, 2, 3)
        engine.unfreeze(*CHANGED)
        train(engine, 4, 5)
        assert engine.held.pools.lent_nbytes == 0
        return engine.full_state_dict()

    results, _ = run_threads(on_a_rank, 2)
    assert_same(results[0], plainly(optimizer))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_bf16_the_master_weights_move_not_what_the_model_reads(stage: int) -> None:
    def on_a_rank(world: World) -> list[dict[str, torch.Tensor]]:
        engine = engine_on(world, optimizer=MOMENTUM, precision="bf16", zero={"stage": stage})
        train(engine, 0, 1)
        states = [engine.full_state_dict()]
        engine.freeze("output.bias")
        states.append(engine.full_state_dict())
        return states

    before, after = run_threads(on_a_rank, 2)[0][0]
    before["output.bias"] = before["output.bias"].bfloat16().float()  # of what is frozen no other is kept
    assert not torch.equal(before["input.weight"], before["input.weight"].bfloat16().float())
    assert_same(after, before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_whose_part_held_nothing_of_a_group_learns_its_state_from_the_others(stage: int) -> None:
    """Of four ranks the shards of small groups lie on one; after the change they lie on another."""
    groups = [{"params": ["output.bias"], "lr": 0.25}, {"params": ["*"]}]

    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=MOMENTUM, zero={"stage": stage, "bucket_mb": 1.0}, param_groups=groups)
        train(engine, 0, 1)
        engine.freeze("input.*", "blocks.*", "output.weight")
        train(engine, 2)
        return engine.full_state_dict()

    plain = Plain(4)
    others = [parameter for name, parameter in plain.parameters.items() if name != "output.bias"]
    plain.optimizer = MOMENTUM([{"params": [plain.parameters["output.bias"]], "lr": 0.25}, {"params": others}])
    plain.train(0, 1)
    for parameter in others:
        parameter.requires_grad_(False)
    assert_same(run_threads(on_a_rank, 4)[0][0], plain.train(2))


def test_each_new_span_has_a_state_of_its_own() -> None:
    """AdamW counts steps in a tensor; of one that two spans shared every step would count twice."""
    engine = engine_on(alone(), optimizer=ADAMW, zero={"stage": 2})
    train(engine, 0)
    engine.freeze("output.bias")
    counters = [
        bucket.update.span_state(span)["step"] for bucket in engine.schedule.trained for span in bucket.update.spans
    ]
    assert len(counters) > 2
    assert len({counter.data_ptr() for counter in counters}) == len(counters)
    assert {counter.item() for counter in counters} == {1.0}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_the_state_that_moved_a_rank_keeps_its_part_alone(stage: int) -> None:
    """A view of the whole bucket would keep all of it."""

    def on_a_rank(world: World) -> None:
        engine = engine_on(world, optimizer=MOMENTUM, zero={"stage": stage})
        train(engine, 0)
        engine.freeze("output.bias")
        kept = [each for bucket in engine.schedule.trained for each in bucket.update.kept.state_tensors()]
        assert kept
        assert [each.untyped_storage().nbytes() for each in kept] == [each.nbytes for each in kept]

    run_threads(on_a_rank, 2)


def test_while_a_gradient_waits_what_trains_cannot_change() -> None:
    engine = engine_on(alone())
    engine.backward(engine(inputs(0, 0)))
    with pytest.raises(EngineStateError, match="while a gradient waits"):
        engine.freeze("output.bias")
    engine.step()
    engine.freeze("output.bias")


class Keeping(torch.optim.SGD):
    """Keeps of each tensor two rows, whatever its shape."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(2, 7)


def test_an_optimizer_whose_state_nobody_can_cut_is_told_so() -> None:
    engine = engine_on(alone(), optimizer=functools.partial(Keeping, lr=0.1))
    train(engine, 0)
    with pytest.raises(EngineStateError, match=r"'rows' of shape \(2, 7\)"):
        engine.freeze("output.bias")


class Norms(Linears):
    """With a parameter that lies transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.input.weight = nn.Parameter(torch.randn(3, 8).t())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_transposed_parameter_keeps_its_strides_and_its_state(stage: int) -> None:
    def on_a_rank(world: World) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
        engine = engine_on(world, Norms, optimizer=MOMENTUM, zero={"stage": stage})
        train(engine, 0, 1)
        engine.freeze("blocks.2.*")
        train(engine, 2)
        with engine.forward_scope():
            stride = engine.module.input.weight.detach().stride()
        return engine.full_state_dict(), stride

    plain = Plain(2, Norms, MOMENTUM)
    plain.train(0, 1)
    plain.model.blocks[2].requires_grad_(False)
    weights, stride = run_threads(on_a_rank, 2)[0][0]
    assert stride == (1, 8)
    assert_same(weights, plain.train(2))
