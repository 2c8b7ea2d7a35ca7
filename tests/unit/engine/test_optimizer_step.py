"""The order in which buckets are updated, on parts that only write down what is asked."""

import functools

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import Linears, alone, engine_on, inputs, seeded

# Clipping beside plain PyTorch: as docs/reference/bits.md says to compare it.


MAX_NORM = 0.05


def clipped_as_in_the_docs(gradients: list[torch.Tensor]) -> None:
    norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0).float()
    for gradient in gradients:
        gradient *= coefficient


def plain(clip_by_torch: bool) -> dict[str, torch.Tensor]:
    model = seeded(Linears)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        model(10 * inputs(step, 0)).backward()
        if clip_by_torch:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            clipped_as_in_the_docs([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("stage", range(4))
def test_a_loop_that_clips_as_the_docs_say_has_the_engines_bits(stage):
    engine = engine_on(alone(), zero={"stage": stage}, max_grad_norm=MAX_NORM)
    for step in range(5):
        result = engine.train_step([(10 * inputs(step, 0),)])
        assert result.clip_coefficient < 1
    exact, by_torch = plain(clip_by_torch=False), plain(clip_by_torch=True)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, exact[name]), name
        torch.testing.assert_close(value, by_torch[name], rtol=1e-5, atol=1e-6)


# What is said of a gradient that is not finite, in one process. On several ranks: tests/distributed/test_precision.


def engine_of(model: nn.Module, **settings: int) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(model, optimizer=functools.partial(torch.optim.SGD, lr=0.1), **settings)


def step(engine: zerotrain.ZeroEngine, factor: float) -> zerotrain.StepResult:
    engine.backward(engine(torch.ones(2, 4)).sum() * factor)
    return engine.step()


def test_only_steps_in_a_row_are_counted():
    engine = engine_of(nn.Linear(4, 4), max_skipped_steps=3)
    bad, good = float("nan"), 1.0
    assert [step(engine, factor).skipped for factor in (bad, bad, good, bad, bad)] == [True, True, False, True, True]
    with pytest.raises(zerotrain.TrainingError, match="was not finite in 3 steps in a row"):
        step(engine, bad)


class Halves(nn.Module):
    """Its second layer gets an infinite gradient, its first none that is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(x)
        hidden.register_hook(lambda gradient: gradient * float("inf"))
        return self.first(x) + hidden


def test_the_kind_is_that_of_the_parameter_named():
    said = "In the backward it was first inf in second.bias; the loss was finite on every rank"
    with pytest.raises(zerotrain.TrainingError, match=said):
        step(engine_of(Halves(), max_skipped_steps=1), 1.0)
