import math

import pytest

from zerotrain.training import constant, warmup_cosine


def test_constant_leaves_the_learning_rate_alone():
    assert [constant(step, 3) for step in range(3)] == [1.0, 1.0, 1.0]


def test_warmup_rises_linearly_and_moves_the_weights_from_the_first_step():
    assert [warmup_cosine(step, 100, warmup_steps=4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_cosine_falls_from_one_to_the_final_fraction_in_the_last_step():
    factors = [warmup_cosine(step, 21, warmup_steps=0, final_fraction=0.2) for step in range(21)]
    assert factors[0] == 1.0
    assert factors[10] == pytest.approx(0.6)  # half way down
    assert factors[5] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert factors[20] == pytest.approx(0.2)
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("max_steps", [1, 2, 3, 20, 21])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 20, 500])
def test_any_length_of_run_and_warmup_gives_factors_above_zero_and_up_to_one(max_steps, warmup_steps):
    factors = [warmup_cosine(step, max_steps, warmup_steps=warmup_steps) for step in range(max_steps)]
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("warmup_steps", -1, "scheduler.warmup_steps=-1 is negative; it must be at least 0"),
        ("final_fraction", 1.5, "scheduler.final_fraction=1.5 is out of range; it must be between 0 and 1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(0, 10, **{name: value})
