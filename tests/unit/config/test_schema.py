"""How often something is done, as a command line says it."""

from fractions import Fraction
from typing import Any

import pytest

from zerotrain.config.checks import checked_config
from zerotrain.config.schema import Rhythm


@pytest.mark.parametrize(
    ("given", "number", "unit"),
    [
        (100, 100, "steps"),
        (10**12, 10**12, "steps"),
        ("100", 100, "steps"),
        ("90s", 90, "seconds"),
        ("15m", 900, "seconds"),
        ("2h", 7200, "seconds"),
        ("0.1epoch", Fraction(1, 10), "epochs"),
        ("2epochs", 2, "epochs"),
        ("5e6tokens", 5_000_000, "tokens"),
        ("1.5e2 tokens", 150, "tokens"),
    ],
)
def test_steps_times_tokens_and_epochs_are_told_apart(given: Any, number: Any, unit: str) -> None:
    assert Rhythm.read(given) == Rhythm(Fraction(number), unit)


@pytest.mark.parametrize(
    "given",
    [None, True, 0, -1, 1.5, "", "0", "-5", "1.5", "1.5h", "0epoch", "0.0tokens", "epoch", "5 steps", "1e999tokens",
     "1e-3epoch", "nanepoch", "infepoch", "5e6 tokens ", "1d", "0100", ["100"]],
)  # fmt: skip
def test_anything_else_is_none(given: Any) -> None:
    assert Rhythm.read(given) is None


@pytest.mark.parametrize("given", ["100", "5e6tokens", "0.1epoch", "'0.1 epoch'"])
def test_each_setting_takes_steps_tokens_and_epochs(compose, given: str) -> None:
    settings = [f"{name}={given}" for name in ("train.eval_every", "train.log_every", "checkpoint.every")]
    config, problems = checked_config(compose(settings))
    assert problems == []
    assert str(config.train.eval_every) == str(config.train.log_every) == config.checkpoint.every == given.strip("'")


def test_a_value_that_is_none_is_told_what_is_allowed(compose) -> None:
    of_data = "it must be a number of steps such as 100, of tokens such as 5e6tokens or of epochs such as 0.1epoch"
    settings = ["train.eval_every=15m", "train.log_every=0", "checkpoint.every=often"]
    assert checked_config(compose(settings))[1] == [
        f"train.eval_every: got 15m; {of_data}, or 0 for only the last; the default is 100",
        f"train.log_every: got 0; {of_data}; the default is 10",
        f"checkpoint.every: got often; {of_data}, a time such as 600s, 15m or 2h, or null for never; "
        "the default is 15m",
    ]
