"""An engine's calls on ranks that are threads, over a wire as late as can be: bits, order, memory, what is counted."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, inputs, train
from zerotrain.comm.world import World
from zerotrain.errors import DisagreementError, EngineStateError
from zerotrain.testing.fake_wire import run_threads

STAGES = [0, 1, 2, 3]
MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("nasty", [{}, {"late_rank": 0}, {"late_rank": 1, "done_rank": 0}], ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_train_to_the_bits_of_plain_pytorch_and_issue_the_same_in_the_same_order(
    stage: int, prefetch: int, nasty: dict[str, int]
) -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, zero={"stage": stage, "prefetch": prefetch})
        train(engine, 0, 1)
        return engine.full_state_dict()

    results, board = run_threads(on_a_rank, 3, **nasty)
    assert_same(results[0], Plain(3).train(0, 1))
    assert board.orders[0] == board.orders[1] == board.orders[2]


@pytest.mark.parametrize("stage", STAGES)
def test_without_overlap_the_same_is_issued_in_the_same_order(stage: int) -> None:
    def on_a_rank(world: World, overlap: bool) -> str:
        engine = engine_on(world, zero={"stage": stage, "overlap": overlap})
        train(engine, 0, 1)
        return engine.weights_sha256()

    waiting, overlapped = (run_threads(functools.partial(on_a_rank, overlap=each), 2) for each in (False, True))
    assert waiting[0] == overlapped[0]
    for rank in (0, 1):
        assert sorted(waiting[1].orders[rank]) == sorted(overlapped[1].orders[rank])


class Deep(Linears):
    num_blocks = 12


@pytest.mark.parametrize("stage", [2, 3])
def test_the_gradients_of_few_buckets_are_held_at_once_however_many_there_are(stage: int) -> None:
    def on_a_rank(world: World) -> float:
        engine = engine_on(world, Deep, zero={"stage": stage})
        train(engine, 0, 1)
        numels = [bucket.layout.padded_numel for bucket in engine.schedule.trained]
        assert sum(numels) > 6 * max(numels)
        return engine._pools.held_nbytes / (4 * max(numels))

    assert max(run_threads(on_a_rank, 3, late_rank=1)[0]) <= 3  # two on the wire, and one that is filled


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_is_ready_to_receive_for_few_buckets_at_once_however_many_there_are(stage: int) -> None:
    engine, prepared = engine_on(alone(), Deep, zero={"stage": stage}), []
    numels = [bucket.layout.padded_numel for bucket in engine.schedule.trained]

    def look(_: torch.Tensor) -> None:
        ready = [bucket for bucket in engine.schedule.trained if bucket.gradient._reduction.is_prepared]
        prepared.append(sum(bucket.layout.padded_numel for bucket in ready))

    loss = engine(inputs(0, 0))
    loss.register_hook(look)
    engine.backward(loss)
    assert 0 < prepared[0] <= 2 * max(numels) < sum(numels)


# ---- the norm


@pytest.mark.parametrize("max_grad_norm", [None, 0.01, 1e6])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_the_mean_over_ranks_and_clips_as_torch_does(
    stage: int, max_grad_norm: float | None
) -> None:
    def on_a_rank(world: World) -> tuple[zerotrain.StepResult, dict[str, torch.Tensor]]:
        engine = engine_on(world, zero={"stage": stage}, max_grad_norm=max_grad_norm)
        engine.backward(engine(inputs(0, world.rank)))
        return engine.step(), engine.full_state_dict()

    results, _ = run_threads(on_a_rank, 3)
    plain = Plain(3)
    gradients = plain.gradients(0)
    norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
    assert len({result.grad_norm for result, _ in results}) == 1
    assert results[0][0].grad_norm == pytest.approx(norm, rel=1e-12 if max_grad_norm else 1e-6)
    coefficient = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    assert results[0][0].clip_coefficient == pytest.approx(coefficient, rel=1e-12)
    for name, gradient in gradients.items():
        plain.parameters[name].grad = gradient * torch.tensor(coefficient, dtype=torch.float32)
    plain.optimizer.step()
    for name, weight in plain.parameters.items():
        torch.testing.assert_close(results[0][1][name], weight.detach(), rtol=0, atol=1e-8)


class Counted(nn.Module):
    """Two vectors; the gradient of each is what its loss is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.zeros(70))]) for _ in range(2))

    def forward(self, *gradients: float, breaks_off: bool = False) -> torch.Tensor:
        first, last = (block[0].float().sum() * g for block, g in zip(self.blocks, gradients, strict=True))
        if breaks_off:
            first.register_hook(fail)
        return first + last


def fail(*_: Any) -> None:
    """Of the two gradients of a backward one is there when the other breaks off."""
    raise ZeroDivisionError


FP16 = zerotrain.PrecisionConfig("fp16", initial_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_scale_is_in_the_backward_alone_not_in_norm_weights_or_clipping(
    stage: int, max_grad_norm: float | None
) -> None:
    def on_a_rank(world: World) -> tuple[list[zerotrain.StepResult], dict[str, torch.Tensor]]:
        engine = engine_on(world, Counted, precision=FP16, zero={"stage": stage}, max_grad_norm=max_grad_norm)
        results = []
        for _ in range(3):
            engine.backward(engine(2, 4 + 4 * world.rank))
            results.append(engine.step())
        return results, engine.full_state_dict()

    steps, weights = run_threads(on_a_rank, 2)[0][0]
    assert [step.loss_scale for step in steps] == [1024, 1024, 2048]
    norm = (70 * (2**2 + 6**2)) ** 0.5
    assert [step.grad_norm for step in steps] == [pytest.approx(norm, rel=1e-6)] * 3
    assert weights["blocks.0.0"].unique().tolist() == [-3 * 0.5 * 2]
    assert weights["blocks.1.0"].unique().tolist() == [-3 * 0.5 * 6]


@pytest.mark.parametrize("precision", ["fp32", FP16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(stage: int, precision: Any, bad_rank: int) -> None:
    def on_a_rank(world: World) -> list[Any]:
        engine = engine_on(world, Counted, precision=precision, zero={"stage": stage})
        seen: list[Any] = []
        for factor in (1.0, float("inf") if world.rank == bad_rank else 1.0, 1.0):
            engine.backward(engine(2, 4) * factor)
            seen.append(engine.step().skipped)
        weights = engine.full_state_dict()
        return [*seen, *(value.unique().tolist() for value in weights.values())]

    results, _ = run_threads(on_a_rank, 3)
    assert [result[:3] for result in results] == [[False, True, False]] * 3
    assert results[0][3:] == [[-2.0], [-4.0]]


# ---- what is given up


@pytest.mark.parametrize("gives_up", ["zero_grad", "exception"])
@pytest.mark.parametrize("syncs_first", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_add_up_until_the_step_and_what_is_given_up_leaves_nothing(
    stage: int, precision: str, syncs_first: bool, gives_up: str
) -> None:
    def on_a_rank(world: World) -> list[Any]:
        engine = engine_on(world, Counted, precision=precision, zero={"stage": stage})

        def two_backwards(*gradients: float, breaks_off: bool = False) -> None:
            with nullcontext() if syncs_first else engine.no_sync():
                engine.backward(engine(*gradients))
            engine.backward(engine(*gradients, breaks_off=breaks_off))

        if gives_up == "zero_grad":
            two_backwards(64, 64)
            engine.zero_grad()
        else:
            with pytest.raises(ZeroDivisionError):
                two_backwards(64, 64, breaks_off=True)
        assert engine._pools.lent_nbytes == 0
        assert not any(bucket.gradient._reduction.is_prepared for bucket in engine.schedule.trained)
        with pytest.raises(EngineStateError, match="step came before a backward"):
            engine.step()
        two_backwards(1, 2 + 2 * world.rank)
        engine.step()
        return [value.unique().tolist() for value in engine.full_state_dict().values()]

    assert run_threads(on_a_rank, 2, late_rank=1)[0][0] == [[-1.0], [-3.0]]


def test_no_sync_ends_with_its_block_also_when_that_raises() -> None:
    engine = engine_on(alone())
    with pytest.raises(ZeroDivisionError), engine.no_sync():
        raise ZeroDivisionError
    train(engine, 0)


def test_a_loss_of_a_step_that_was_given_up_is_not_blamed_for_the_next() -> None:
    engine = engine_on(alone(), max_skipped_steps=1)
    engine.backward(engine(inputs(0, 0)) * float("nan"))
    engine.zero_grad()
    loss = engine(inputs(0, 0))
    loss.register_hook(lambda gradient: gradient * float("inf"))
    engine.backward(loss * 1)
    with pytest.raises(zerotrain.TrainingError, match="the loss was finite on every rank"):
        engine.step()


def test_a_loss_from_before_the_last_step_is_refused_and_one_from_before_a_skipped_step_is_not() -> None:
    engine = engine_on(alone())
    old = [engine(inputs(0, 0)) for _ in range(2)]
    engine.backward(engine(inputs(0, 0)) * float("nan"))
    assert engine.step().skipped
    engine.backward(old[0])
    assert not engine.step().skipped
    with pytest.raises(EngineStateError, match="computed before the last step"):
        engine.backward(old[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_that_are_kept_alive_hold_up_no_reduction_of_later_backwards(stage: int) -> None:
    def on_a_rank(world: World, keeps: bool) -> None:
        engine, kept = engine_on(world, zero={"stage": stage}), []
        for _ in range(3):
            loss = engine(inputs(0, world.rank))
            kept += [loss] if keeps else []
            engine.backward(loss)
        engine.step()

    boards = [run_threads(functools.partial(on_a_rank, keeps=keeps), 2)[1] for keeps in (False, True)]
    assert boards[0].orders == boards[1].orders


class ReadWhileFull(Linears):
    """Reads the last block's weight before the blocks, which nobody notices while an earlier forward keeps it full. A
    parameter beside it is not used at all, so that no hook hears of that gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, is_early: bool = False) -> torch.Tensor:
        return super().forward(x + self.blocks[3].weight[:3, 0] if is_early else x)


def test_a_gradient_that_comes_when_its_bucket_was_closed_is_told() -> None:
    engine = engine_on(alone(), ReadWhileFull, zero={"stage": 3})
    engine(inputs(0, 0))
    loss = engine(inputs(0, 0), is_early=True)
    with pytest.raises(EngineStateError, match=r"the gradient of blocks\.3\.weight was late"):
        engine.backward(loss)


# ---- between the steps


def test_behind_each_call_the_engine_is_idle_and_sharded_weights_refuse_to_be_read() -> None:
    engine = engine_on(alone(), zero={"stage": 3})
    module: Any = engine.module

    def read() -> None:
        with pytest.raises(EngineStateError, match="between engine calls"):
            module.blocks[1].weight.sum()

    loss = engine(inputs(0, 0))
    read()
    engine.backward(loss)
    read()
    engine.step()
    read()
    with pytest.raises(ZeroDivisionError), engine.forward_scope():
        raise ZeroDivisionError
    read()


@pytest.mark.parametrize("stage", STAGES)
def test_an_evaluation_in_mid_step_counts_outside_it_changes_nothing_and_leaves_nothing_gathered(stage: int) -> None:
    def on_a_rank(world: World) -> None:
        engine, x = engine_on(world, zero={"stage": stage}), inputs(1, world.rank)

        def evaluated() -> tuple[torch.Tensor, int, int]:
            outside = engine.ledger.outside_steps.sent_nbytes
            with torch.no_grad():
                loss = engine(x)
            return loss, engine.ledger.outside_steps.sent_nbytes - outside, engine.memory_bytes()["parameters"]

        train(engine, 0)
        at_rest = engine.memory_bytes()["parameters"]
        ordinary = engine.ledger.last_step.calls
        before = evaluated()
        loss = engine(x)
        between = evaluated()
        engine.backward(loss)
        behind = evaluated()
        engine.step()
        assert torch.equal(before[0], loss.detach())
        assert all(torch.equal(each[0], before[0]) and each[2] == at_rest for each in (before, between, behind))
        assert behind[1] == before[1] >= between[1]
        assert (before[1] > 0) == (stage == 3)
        calls = engine.ledger.last_step.calls
        assert (calls["reduce"], calls["norm"]) == (ordinary["reduce"], 1)
        assert calls["gather"] - ordinary["gather"] == (2 if stage == 3 else 0)  # what was kept for the backward

    run_threads(on_a_rank, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_was_given_up_does_not_count_in_the_next(stage: int) -> None:
    def on_a_rank(world: World) -> None:
        engine = engine_on(world, zero={"stage": stage})
        train(engine, 0, 1)
        ordinary = engine.ledger.last_step
        engine.backward(engine(inputs(0, world.rank)))
        engine.zero_grad()
        train(engine, 2)
        assert engine.ledger.last_step.calls == ordinary.calls
        assert engine.ledger.last_step.nbytes == ordinary.nbytes

    run_threads(on_a_rank, 2)


def test_ranks_whose_collectives_came_in_another_order_are_told_at_the_step() -> None:
    """Two at once, so that nobody waits in vain."""

    def on_a_rank(world: World) -> None:
        engine = engine_on(world)
        gathers = [engine.collectives.gather(name, torch.zeros(2), torch.zeros(1)) for name in ("a", "b")]
        for gather in gathers if world.rank == 0 else reversed(gathers):
            gather.issue()
        for gather in gathers:
            gather.finish()
        with pytest.raises(DisagreementError, match="order of the collectives"):
            train(engine, 0)

    run_threads(on_a_rank, 2)


def test_ranks_with_another_number_of_backwards_are_told_at_the_step() -> None:
    def on_a_rank(world: World) -> None:
        engine = engine_on(world)
        for _ in range(world.rank):
            with engine.no_sync():
                engine.backward(engine(inputs(0, 0)))
        with pytest.raises(DisagreementError, match="backwards since the last step: 1 on rank 0, 2 on rank 1"):
            train(engine, 0)

    run_threads(on_a_rank, 2)
