"""The engine's calls as a user makes them, on real ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    Case,
    batch,
    build,
    hashes_over_ranks,
    make_model,
    micro_batches,
    place,
    reference_weights,
    run_over,
    sha256,
)
from torch import nn

import zerotrain
from zerotrain.errors import EngineStateError
from zerotrain.settings import ZeroConfig

STAGES = [0, 1, 2, 3]
SMALL = Case(ZeroConfig(bucket_mb=0.05), num_micro_batches=2)


def by_hand(stage: int) -> str:
    rank, size = place()
    engine = build(SMALL.with_zero(stage=stage))
    for step in range(SMALL.num_steps):
        first, last = micro_batches(batch(step, size, 2), rank)
        with engine.no_sync():
            engine.backward(engine(*first) / 2)
        engine.backward(engine(*last), weight=0.5)
        result = engine.step()
        assert result.grad_norm > 0
        assert 0 < result.clip_coefficient <= 1
        assert not result.skipped
    return engine.weights_sha256()


def test_forward_backward_and_step_by_hand_are_train_step() -> None:
    expected = sha256(reference_weights(SMALL, 2))
    assert run_over(STAGES, by_hand, 2) == [[expected, expected]] * 4


def two_backwards(case: Case) -> dict[str, torch.Tensor]:
    """Two losses, each reduced as it comes, and one step."""
    rank, size = place()
    engine = build(case)
    for step in range(SMALL.num_steps):
        for inputs in micro_batches(batch(step, size, 2), rank):
            engine.backward(engine(*inputs) / 2)
        engine.step()
    return engine.full_state_dict()


def test_two_reduced_backwards_before_a_step_add_up() -> None:
    expected = reference_weights(SMALL, 2)
    # Of few buckets all are still on their way when the second backward begins.
    cases = [SMALL.with_zero(stage=stage, bucket_mb=bucket_mb) for stage in STAGES for bucket_mb in (0.05, 25.0)]
    results = [on_rank_0 for on_rank_0, _ in run_over(cases, two_backwards, 2)]
    for got in results:
        for name, weight in expected.items():
            assert torch.equal(got[name], results[0][name])
            torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-3)


class Odd(nn.Module):
    """Reads a layer's weight without calling the layer, leaves one parameter unused, one frozen, one to rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.read = nn.Linear(7, 5)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.only_on_rank_0 = nn.Parameter(torch.ones(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.linear(x, block.weight, block.bias).tanh()
        x = self.frozen(nn.functional.linear(x, self.read.weight))
        if rank == 0:
            x = x * self.only_on_rank_0
        return x.square().mean()


def odd_inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def train_odd(stage: int) -> dict[str, torch.Tensor]:
    rank, _ = place()
    engine = zerotrain.build_engine(
        Odd(), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5), zero=ZeroConfig(stage=stage, bucket_mb=1e-4)
    )
    for step in range(3):
        engine.backward(engine(odd_inputs(step, rank), rank))
        engine.step()
    return engine.full_state_dict()


def odd_reference() -> dict[str, torch.Tensor]:
    model = Odd()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for step in range(3):
        sums = [torch.zeros_like(parameter) for parameter in trained]
        for rank in range(2):
            model.zero_grad()
            (model(odd_inputs(step, rank), rank) / 2).backward()
            for total, parameter in zip(sums, trained, strict=True):
                total += torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for total, parameter in zip(sums, trained, strict=True):
            parameter.grad = total
        optimizer.step()
    return model.state_dict()


def test_unannounced_unused_frozen_and_one_sided_parameters_train_as_in_plain_pytorch() -> None:
    expected = odd_reference()
    for got, _ in run_over(STAGES, train_odd, 2):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def overflow(stage: int) -> list[bool]:
    """A gradient that is infinite on rank 1 alone, in the second of three steps."""
    rank, size = place()
    engine = build(SMALL.with_zero(stage=stage))
    skipped = []
    for step in range(3):
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        engine.backward(engine(*micro_batches(batch(step, size, 1), rank)[0]) * factor)
        before = engine.weights_sha256()
        result = engine.step()
        skipped.append(result.skipped)
        assert (engine.weights_sha256() == before) == result.skipped
    return skipped


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    assert run_over(STAGES, overflow, 2) == [[[False, True, False]] * 2] * 4


def give_inf(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full_like(gradient, float("inf"))


def test_a_loss_of_a_step_that_was_given_up_is_not_blamed_for_the_next() -> None:
    model = nn.Linear(4, 4)
    engine = zerotrain.build_engine(
        model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), max_skipped_steps=1
    )
    engine.backward(engine(torch.full((2, 4), float("nan"))).sum())
    engine.zero_grad()
    output = engine(torch.ones(2, 4))
    output.register_hook(give_inf)
    engine.backward(output.sum())
    with pytest.raises(zerotrain.TrainingError, match="the loss was finite on every rank"):
        engine.step()


MISTAKES: dict[str, Any] = {
    "step without backward": (lambda engine, inputs: engine.step(), "first call engine.backward(loss)"),
    "train_step without data": (lambda engine, inputs: engine.train_step([]), "first call engine.backward(loss)"),
    "loss.backward()": (
        lambda engine, inputs: engine(*inputs).backward(),
        "call engine.backward(loss), not loss.backward()",
    ),
    "weight read at rest": (
        lambda engine, inputs: engine.module.wte.weight.sum(),
        "read weights with engine.full_state_dict()",
    ),
    "step after no_sync only": (
        lambda engine, inputs: accumulate_only(engine, inputs),
        "outside `with engine.no_sync()`",
    ),
    "loss without graph": (lambda engine, inputs: engine.backward(torch.zeros(())), "torch.no_grad()"),
}
"""What a user may do wrong, and what the answer must contain."""


def raised_by(mistake: str) -> str:
    rank, size = place()
    engine = build(SMALL.with_zero(stage=3))
    make, _ = MISTAKES[mistake]
    try:
        make(engine, micro_batches(batch(0, size, 1), rank)[0])
    except EngineStateError as error:
        return str(error)
    return "nothing was raised"


def accumulate_only(engine: zerotrain.ZeroEngine, inputs: Any) -> None:
    with engine.no_sync():
        engine.backward(engine(*inputs))
    engine.step()


def test_a_wrong_call_is_answered_with_what_to_do() -> None:
    for (_, answer), by_rank in zip(MISTAKES.values(), run_over(list(MISTAKES), raised_by, 2), strict=True):
        assert all(answer in message for message in by_rank)


def evaluate_between_forward_and_backward(stage: int) -> str:
    rank, size = place()
    engine = build(SMALL.with_zero(stage=stage))
    for step in range(SMALL.num_steps):
        first, last = micro_batches(batch(step, size, 2), rank)
        losses = []
        for inputs in (first, last):
            losses.append(engine(*inputs))
            with torch.no_grad():
                assert torch.equal(engine(*inputs), losses[-1].detach())
        with engine.no_sync():
            engine.backward(losses[0], weight=0.5)
        engine.backward(losses[1], weight=0.5)
        engine.step()
    return engine.weights_sha256()


def test_two_forwards_before_their_backwards_with_evaluations_between() -> None:
    expected = sha256(reference_weights(SMALL, 2))
    assert run_over(STAGES, evaluate_between_forward_and_backward, 2) == [[expected, expected]] * 4


def test_every_rank_starts_from_the_weights_of_rank_0() -> None:
    expected = sha256({name: value.detach() for name, value in make_model().named_parameters()})
    assert run_over(STAGES, start_apart, 2) == [[expected, expected]] * 4


def start_apart(stage: int) -> str:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += dist.get_rank()
    return build(SMALL.with_zero(stage=stage), model).weights_sha256()


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    cases = [SMALL.with_zero(stage=stage) for stage in (3, 1, 3)]
    assert set(hashes_over_ranks(cases, 2)) == {sha256(reference_weights(SMALL, 2))}


def failed_update(stage: int) -> list[str]:
    """An update that fails on all ranks alike, after which the engine goes on; another, after which it is given up."""
    rank, size = place()
    inputs = micro_batches(batch(0, size, 1), rank)[0]
    case = replace(SMALL, optimizer="sgd").with_zero(stage=stage)
    hashes = []
    for gives_up in (False, True):
        engine = build(case)
        engine.backward(engine(*inputs))
        rates = [group["lr"] for group in engine.param_groups]
        for group in engine.param_groups:
            group["lr"] = None
        with pytest.raises(EngineStateError, match="lr of group 'matrices' was set to None; it must be a number"):
            engine.step()
        with pytest.raises(EngineStateError, match="step came before a backward"):
            engine.step()
        if gives_up:
            del engine
            engine = build(case)
        for group, rate in zip(engine.param_groups, rates, strict=True):
            group["lr"] = rate
        engine.backward(engine(*inputs))
        engine.step()
        hashes.append(engine.weights_sha256())
    return hashes


@pytest.mark.case(
    "calls: Calls",
    "An exception in the optimizer, on all ranks",
    "the step's gradients are forgotten; the engine goes on, or can be deleted",
)
def test_after_an_update_that_fails_on_all_ranks_its_gradient_is_forgotten_and_nobody_waits() -> None:
    by_stage = run_over(STAGES, failed_update, 2)
    assert all(on_rank_0 == on_rank_1 for on_rank_0, on_rank_1 in by_stage)
    assert len({given_up for (_, given_up), _ in by_stage}) == 1


def closed_twice(_: None) -> float:
    world = zerotrain.World.current(torch.device("cpu"))
    world.close()
    world.close()
    ones = torch.ones(())
    dist.all_reduce(ones)
    return ones.item()


def test_a_world_may_be_closed_twice_and_leaves_the_group_of_the_caller() -> None:
    assert run_over([None], closed_twice, 2) == [[2.0, 2.0]]
