"""An engine's calls on ranks that are threads, over a wire as late as can be: bits, order, memory, what is counted."""

from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Counted, Linears, Plain, assert_same, engine_on, inputs, train
from zerotrain.comm.world import World

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("nasty", [{}, {"late_rank": 0}, {"late_rank": 1, "done_rank": 0}], ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.thinned(2)
def test_three_ranks_train_to_the_bits_of_plain_pytorch_and_issue_the_same_in_the_same_order(stage, prefetch, nasty):
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, zero={"stage": stage, "prefetch": prefetch})
        train(engine, 0, 1)
        return engine.full_state_dict()

    results, board = run_threads(on_a_rank, 3, **nasty)
    assert_same(results[0], Plain(3).train(0, 1))
    assert board.orders[0] == board.orders[1] == board.orders[2]


class Deep(Linears):
    num_blocks = 12


@pytest.mark.parametrize("stage", [2, 3])
def test_the_gradients_of_few_buckets_are_held_at_once_however_many_there_are(stage):
    def on_a_rank(world: World) -> float:
        engine = engine_on(world, Deep, zero={"stage": stage})
        train(engine, 0, 1)
        numels = [bucket.layout.padded_numel for bucket in engine.schedule.trained]
        assert sum(numels) > 6 * max(numels)
        return engine.held.pools.held_nbytes / (4 * max(numels))

    assert max(run_threads(on_a_rank, 3, late_rank=1)[0]) <= 3  # two on the wire, and one that is filled


# ---- the norm


@pytest.mark.parametrize("max_grad_norm", [None, 0.01, 1e6])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_the_mean_over_ranks_and_clips_as_torch_does(stage, max_grad_norm):
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


FP16 = zerotrain.PrecisionConfig("fp16", initial_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_scale_is_in_the_backward_alone_not_in_norm_weights_or_clipping(stage, max_grad_norm):
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
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(stage, precision, bad_rank):
    def on_a_rank(world: World) -> list[Any]:
        engine = engine_on(world, Counted, precision=precision, zero={"stage": stage})
        seen: list[Any] = []
        for factor in (1.0, float("inf") if world.rank == bad_rank else 1.0, 1.0):
            engine.backward(engine(2, 4) * factor)
            seen.append(engine.step().skipped)
        assert engine.loss_scale == (512 if precision is FP16 else 1)  # half of what it was, and one clean step
        weights = engine.full_state_dict()
        return [*seen, *(value.unique().tolist() for value in weights.values())]

    results, _ = run_threads(on_a_rank, 3)
    assert [result[:3] for result in results] == [[False, True, False]] * 3
    assert results[0][3:] == [[-2.0], [-4.0]]


def test_the_norm_to_clip_to_is_that_of_the_build():
    """The exact sums of squares, and graphs, are made for it."""
    engine = zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.AdamW, max_grad_norm=1.0)
    with pytest.raises(AttributeError, match="no setter"):
        engine.max_grad_norm = 0.5
    assert engine.max_grad_norm == 1.0
