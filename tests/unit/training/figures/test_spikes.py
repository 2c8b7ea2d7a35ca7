"""Spikes: a number far above those of the steps before it, and nothing else, is told."""

import math
import random
import statistics
from typing import Any

import pytest

from zerotrain.training.callbacks.record import MIN_BEFORE, MIN_SCORE, NUM_BEFORE, Before, Spike, Spikes


def spikes_in(losses: list[Any], norms: list[Any] | None = None) -> dict[int, Spike]:
    """By the index of the step."""
    spikes = Spikes()
    told = [
        spikes.of({"loss": loss, "grad_norm": norm})
        for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True)
    ]
    return {step: spike for step, spike in enumerate(told) if spike is not None}


def falling(steps: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    """A loss that falls from 10 to 3, with noise."""
    draw = random.Random(seed)
    return [3 + 7 * math.exp(-step / 100) + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.5])
def test_one_step_far_above_the_others_is_told_and_no_other(noise: float) -> None:
    losses = falling(1000, noise=noise)
    assert spikes_in(losses) == {}
    losses[700] += 12 * max(noise, 0.04)
    found = spikes_in(losses)
    assert list(found) == [700]
    assert (found[700].name, found[700].value) == ("loss", losses[700])
    assert found[700].median == sorted(losses[600:700])[50]


def test_the_larger_of_loss_and_norm_is_told() -> None:
    losses, norms = falling(200), falling(200, seed=1)
    losses[150], norms[150], norms[160] = 20.0, 90.0, 60.0
    found = spikes_in(losses, norms)
    assert {step: spike.name for step, spike in found.items()} == {150: "grad_norm", 160: "grad_norm"}


def test_a_score_is_told_by_quartiles_of_the_steps_before_alone() -> None:
    draw, before, values = random.Random(3), Before(), []
    for _ in range(3 * NUM_BEFORE):
        value = draw.choice([draw.gauss(5, 1), 5.0, draw.uniform(0, 100)])
        window = sorted(values[-NUM_BEFORE:])
        score, median = before.score(value)
        if len(window) >= MIN_BEFORE:
            lower, middle, upper = (window[len(window) * part // 4] for part in (1, 2, 3))
            assert median == middle
            assert score == (value - middle) / max((upper - lower) / 1.349, 0.01 * middle)
        else:
            assert score == 0.0
        before.add(value)
        values.append(value)


def test_the_divisor_is_a_standard_deviation() -> None:
    draw, scores = random.Random(5), []
    for _ in range(100):
        before = Before()
        for _ in range(NUM_BEFORE):
            before.add(draw.gauss(50, 3))
        scores.append(before.score(50 + 10 * 3)[0])
    assert statistics.fmean(scores) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_what_is_unknown_or_not_finite_is_no_spike_and_moves_no_median(bad: float | None) -> None:
    losses: list[Any] = falling(200)
    losses[100:160] = [bad] * 60
    assert spikes_in(losses) == {}
    losses[170] = 30.0
    assert list(spikes_in(losses)) == [170]


def test_nothing_is_told_of_the_first_steps_of_a_fall_of_a_level_and_of_what_rises_slowly() -> None:
    first = [1.0] * (MIN_BEFORE - 1) + [1e9]
    assert spikes_in(first) == {}
    assert list(spikes_in([1.0] * MIN_BEFORE + [1e9])) == [MIN_BEFORE]
    assert spikes_in([1.0] * 50 + [1.0 + MIN_SCORE * 0.0099]) == {}
    assert spikes_in([100.0] * 50 + [-1e9] + [100.0] * 9) == {}
    assert spikes_in([0.0] * 50 + [1.0]) == {}
    assert spikes_in([1.01**step for step in range(500)]) == {}


def test_a_curve_that_stays_on_a_higher_level_is_told_until_a_quarter_of_the_steps_before_are_of_it() -> None:
    found = spikes_in([1.0] * 200 + [2.0] * 200)
    assert list(found) == list(range(200, 200 + NUM_BEFORE // 4))
