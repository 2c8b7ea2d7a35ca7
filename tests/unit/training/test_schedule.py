import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from zerotrain.training import (
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)

FALLING = [warmup_cosine, warmup_linear, warmup_polynomial, warmup_stable_decay]
WITH_WARMUP = [*FALLING, warmup_inverse_sqrt]
NUM_STEPS = 41


def factors_of(schedule: Callable[..., float], num_steps: int = NUM_STEPS, **arguments: Any) -> list[float]:
    return [schedule(step, num_steps, **arguments) for step in range(num_steps)]


def rates_of(make: Callable[[torch.optim.Optimizer], Any], num_steps: int = NUM_STEPS) -> list[float]:
    """The learning rates that a scheduler of somebody else gives an optimizer that begins with 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        for _ in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", WITH_WARMUP)
def test_warmup_rises_linearly_and_moves_the_weights_from_the_first_step(schedule):
    assert [schedule(step, 100, warmup_steps=4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", FALLING)
def test_what_falls_is_at_one_behind_the_rise_and_at_the_final_fraction_in_the_last_step(schedule):
    factors = factors_of(schedule, warmup_steps=5, final_fraction=0.2)
    assert factors[5] == 1.0
    assert factors[-1] == pytest.approx(0.2)
    assert factors[5:] == sorted(factors[5:], reverse=True)


@pytest.mark.parametrize("schedule", WITH_WARMUP)
@pytest.mark.parametrize("max_steps", [1, 2, 3, 20, 21])
@pytest.mark.parametrize("warmup_steps", [0, 0.03, 0.99, 1, 2, 20, 500])
def test_any_length_of_run_and_warmup_gives_factors_above_zero_and_up_to_one(schedule, max_steps, warmup_steps):
    factors = [schedule(step, max_steps, warmup_steps=warmup_steps) for step in range(max_steps)]
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize("schedule", WITH_WARMUP)
@pytest.mark.parametrize(("part", "num_steps", "rise"), [(0.1, 40, 4), (0.07, 100, 7), (0.001, 40, 0), (0.0, 40, 0)])
def test_a_warmup_below_one_is_a_part_of_all_steps(schedule, part, num_steps, rise):
    assert factors_of(schedule, num_steps, warmup_steps=part) == factors_of(schedule, num_steps, warmup_steps=rise)


def test_a_run_with_a_stable_part_keeps_its_peak_until_the_last_steps():
    factors = factors_of(warmup_stable_decay, 100, warmup_steps=10, decay_fraction=0.2, final_fraction=0.0)
    assert factors[9:80] == [1.0] * 71
    assert factors[80:] == pytest.approx([1 - done / 20 for done in range(1, 21)])
    short = factors_of(warmup_stable_decay, 8, warmup_steps=5, decay_fraction=1.0, final_fraction=0.5)
    assert short == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.75, 0.5])  # the fall waits for the rise


def test_the_inverse_root_is_that_of_the_transformer():
    num_warmup = 10
    formula = [min(step**-0.5, step * num_warmup**-1.5) * num_warmup**0.5 for step in range(1, NUM_STEPS + 1)]
    assert factors_of(warmup_inverse_sqrt, warmup_steps=num_warmup) == pytest.approx(formula)
    assert warmup_inverse_sqrt(39, 1000, warmup_steps=num_warmup) == pytest.approx(0.5)


RISE = 6
FALL = NUM_STEPS - 1 - RISE


@pytest.mark.parametrize(
    ("schedule", "arguments", "fall"),
    [
        (warmup_cosine, {"final_fraction": 0.1}, lambda opt: lr_scheduler.CosineAnnealingLR(opt, FALL, eta_min=0.1)),
        (warmup_linear, {"final_fraction": 0.1}, lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=FALL)),
        (
            warmup_polynomial,
            {"final_fraction": 0.0, "power": 3.0},
            lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=FALL, power=3.0),
        ),
    ],
)
def test_a_rise_and_a_fall_are_those_of_torch(schedule, arguments, fall):
    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, 1 / RISE, 1.0, total_iters=RISE - 1)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall(optimizer)], [RISE])

    assert factors_of(schedule, warmup_steps=RISE, **arguments) == pytest.approx(rates_of(make), abs=1e-9)


@pytest.mark.parametrize(("decay", "theirs"), [("linear", "linear"), ("sqrt", "1-sqrt"), ("cosine", "cosine")])
def test_a_stable_part_and_a_fall_are_those_of_transformers_done_one_step_later(decay, theirs):
    """Theirs would reach its end behind the last step; and their rise begins with a step that changes nothing."""
    make = pytest.importorskip("transformers.optimization").get_wsd_schedule
    steps = {"num_warmup_steps": 0, "num_training_steps": NUM_STEPS - 1, "num_decay_steps": 10}
    whole = rates_of(lambda opt: make(opt, decay_type=theirs, min_lr_ratio=0.1, **steps))
    own = {"decay": decay, "decay_fraction": 10 / NUM_STEPS, "final_fraction": 0.1}
    assert factors_of(warmup_stable_decay, warmup_steps=0, **own) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "name", "value", "message"),
    [
        (warmup_cosine, "warmup_steps", -1, "scheduler.warmup_steps=-1 is negative; it must be at least 0"),
        (warmup_linear, "warmup_steps", 2.5, "scheduler.warmup_steps=2.5 is no number of steps; it must be whole, or"),
        (warmup_cosine, "final_fraction", 1.5, "scheduler.final_fraction=1.5 is out of range; it must be between 0"),
        (warmup_stable_decay, "decay_fraction", 2, "scheduler.decay_fraction=2 is out of range; it must be between 0"),
        (warmup_stable_decay, "decay", "fast", "scheduler.decay=fast is no form of a fall; it must be one of linear, "),
        (warmup_polynomial, "power", 0, "scheduler.power=0 is out of range; it must be above 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(schedule, name, value, message):
    with pytest.raises(ValueError, match=message):
        schedule(0, 10, **{name: value})
