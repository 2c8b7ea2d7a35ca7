"""What users do to a model around a step: as in plain PyTorch, or a sentence. With threads as ranks."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import EVERYWHERE, SGD, Net, build
from tests.unit.engine.parts import DTYPES, alone, seeded


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.case(
    "calls: Calls",
    "A graph that reaches behind the last update (truncated backpropagation without `detach`)",
    "refused by PyTorch, which counts versions",
)
@EVERYWHERE
def test_a_graph_that_reaches_behind_the_last_update_is_refused_by_pytorch_itself_and_a_detached_one_trains(
    stage, size, precision
):
    def truncated_backpropagation(world: zerotrain.World) -> str:
        engine = build(world, stage, precision)
        state = engine(inputs(world.rank))
        engine.backward(state.float().square().mean(), retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(engine(inputs(world.rank), state).float().square().mean())
        engine.backward(engine(inputs(world.rank), state.detach()).float().square().mean())
        engine.step()
        return engine.weights_sha256()

    results, _ = run_threads(truncated_backpropagation, size, late_rank=size - 1)
    assert len(set(results)) == 1


@pytest.mark.case("calls: Calls", "A loop in another thread than the build", "same bits")
@pytest.mark.parametrize("stage", range(4))
def test_a_loop_in_a_thread_of_its_own_trains_as_one_where_the_engine_was_built(stage):
    def trained(run: Callable[[Callable[[], None]], object]) -> str:
        engine = build(alone(), stage, "fp32")

        def two_steps() -> None:
            for step in range(2):
                engine.backward(engine(inputs(step)).square().mean())
                engine.step()

        run(two_steps)
        return engine.weights_sha256()

    here = trained(lambda loop: loop())  # its nodes have higher numbers than those of a new thread
    with ThreadPoolExecutor(1) as thread:
        assert trained(lambda loop: thread.submit(loop).result()) == here


@pytest.mark.case("precision", "a finite gradient whose square leaves fp32, without clipping", "trained")
@EVERYWHERE
def test_a_finite_gradient_whose_square_leaves_fp32_is_trained(stage, size, precision):
    def one_step(world: zerotrain.World, factor: float) -> tuple[zerotrain.StepResult, torch.Tensor | None]:
        engine = build(world, stage, precision)
        engine.backward(engine(inputs(world.rank)).float().sum() * factor)
        result = engine.step()
        return result, engine.full_state_dict().get("first.weight")

    huge, _ = run_threads(functools.partial(one_step, factor=2.0**80), size, late_rank=0)
    small, _ = run_threads(functools.partial(one_step, factor=1.0), size)
    for (result, _), (plain, _) in zip(huge, small, strict=True):
        assert not result.skipped
        assert result.grad_norm == pytest.approx(plain.grad_norm * 2.0**80, rel=1e-6)
    before = seeded(Net).first.weight.detach()
    moved = (huge[0][1] - before) / 2.0**80  # a power of two: the step is the small one's, but for the weight beside it
    assert torch.allclose(moved, small[0][1] - before, rtol=1e-2, atol=1e-6)


@pytest.mark.case(
    "calls: Calls",
    "A loss that is not one number; a second engine of a model that has one, with blocks or without",
    "refused",
)
@pytest.mark.parametrize("stage", range(4))
def test_a_second_engine_is_refused_also_of_a_model_without_blocks(stage):
    model = nn.Sequential(nn.Linear(3, 2))
    engine = zerotrain.build_engine(model, optimizer=SGD, zero=zerotrain.ZeroConfig(stage=stage))
    for other in (model, nn.Sequential(model, nn.ReLU()), model[0]):
        with pytest.raises(zerotrain.EngineStateError, match="has an engine already"):
            zerotrain.build_engine(other, optimizer=SGD)
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()


@pytest.mark.case(
    "calls: Calls",
    "No memory left, or another error of this rank's own, in a collective",
    "raised as it is; no other rank is blamed",
)
def test_an_error_of_this_ranks_own_is_raised_as_it_is_and_blames_no_other():
    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    def without_memory(world: zerotrain.World) -> str:
        engine = build(world, 2, "fp32")
        gradient = engine.schedule.trained[-1].gradient
        gradient.reduction.handle._send = fail
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 2 GiB"):
            engine.backward(engine(inputs(world.rank)).sum())
        return "told"

    assert run_threads(without_memory, 2)[0] == ["told", "told"]


class Head(nn.Module):
    """What a user keeps outside the engine: a parameter of his own, and a function that notes what flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() * self.scale
        x.register_hook(lambda gradient: self.seen.append(gradient.clone()))
        return x.square().mean()


@pytest.mark.case(
    "around_a_step",
    "look at gradients in hooks, autograd functions, `x.grad`, or parameters of my own outside the engine",
    "as in plain PyTorch: this rank's own gradient, without a factor 1/N (in fp16 times `engine.loss_scale`)",
)
@EVERYWHERE
def test_what_hooks_inputs_and_parameters_outside_the_engine_see_is_the_gradient_of_plain_pytorch(
    stage, size, precision
):
    def gradients(world: zerotrain.World) -> list[torch.Tensor]:
        engine, head = build(world, stage, precision), Head()
        x = inputs(world.rank).requires_grad_()
        engine.backward(head(engine(x)))
        engine.step()
        assert x.grad is not None
        assert head.scale.grad is not None
        return [x.grad, head.scale.grad, *head.seen]

    def plain(rank: int) -> list[torch.Tensor]:
        dtype = DTYPES[precision]
        model, head, x = seeded(Net).to(dtype), Head(), inputs(rank).requires_grad_()
        head(model(x.to(dtype))).backward()
        assert x.grad is not None
        assert head.scale.grad is not None
        return [x.grad, head.scale.grad, *head.seen]

    for rank, got in enumerate(run_threads(gradients, size, late_rank=0)[0]):
        for mine, expected in zip(got, plain(rank), strict=True):
            assert torch.equal(mine, expected)
