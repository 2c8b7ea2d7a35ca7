"""What is said of a gradient that is not finite, in one process. On several ranks: tests/distributed/test_precision."""

import functools

import pytest
import torch
from torch import nn

import zerotrain


def engine_of(model: nn.Module, **settings: int) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(model, optimizer=functools.partial(torch.optim.SGD, lr=0.1), **settings)


def step(engine: zerotrain.ZeroEngine, factor: float) -> zerotrain.StepResult:
    engine.backward(engine(torch.ones(2, 4)).sum() * factor)
    return engine.step()


def test_only_steps_in_a_row_are_counted() -> None:
    engine = engine_of(nn.Linear(4, 4), max_skipped_steps=3)
    bad, good = float("nan"), 1.0
    assert [step(engine, factor).skipped for factor in (bad, bad, good, bad, bad)] == [True, True, False, True, True]
    with pytest.raises(zerotrain.TrainingError, match="was not finite in 3 steps in a row"):
        step(engine, bad)


def test_finite_gradients_whose_squares_leave_fp32_are_trained() -> None:
    assert not step(engine_of(nn.Linear(4, 4), max_skipped_steps=1), 1e25).skipped


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


def test_the_kind_is_that_of_the_parameter_named() -> None:
    said = "In the backward it was first inf in second.bias; the loss was finite on every rank"
    with pytest.raises(zerotrain.TrainingError, match=said):
        step(engine_of(Halves(), max_skipped_steps=1), 1.0)
