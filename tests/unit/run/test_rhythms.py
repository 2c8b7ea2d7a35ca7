"""The steps that rhythms of epochs and tokens come to."""

from typing import Any

import pytest

from tests.unit.run.preflight.test_length import Rows, config_with
from zerotrain.config.schema import CheckpointConfig
from zerotrain.errors import ConfigError
from zerotrain.run.factory import RHYTHMS, require_rhythms, rhythms_in_steps


def rhythms(given: Any, rows: Any = None, num_ranks: int = 1, **train: Any) -> list[int | None]:
    config = config_with(eval_every=given, log_every=given, **train)
    config.checkpoint = CheckpointConfig(every=given if given is None else str(given))
    steps = rhythms_in_steps(config, rows or Rows(), num_ranks)
    return [steps[name] for name in RHYTHMS]


@pytest.mark.parametrize(
    ("given", "others", "steps"),
    [
        (100, {}, 100),
        ("100", {"num_ranks": 8}, 100),
        ("1epoch", {}, 250),
        ("0.1epoch", {}, 25),
        ("0.1 epochs", {"num_ranks": 2}, 12),  # 12.5, to the even one
        ("0.1epoch", {"num_ranks": 4}, 6),
        ("0.1epoch", {"num_ranks": 4, "virtual_ranks": 1}, 25),
        ("0.1epoch", {"gradient_accumulation_steps": 5}, 5),
        ("0.0001epoch", {}, 1),
        ("1.6e4tokens", {}, 250),
        ("640 tokens", {}, 10),
        ("1token", {}, 1),
    ],
)
def test_a_rhythm_comes_to_whole_steps_of_the_global_batch(given: Any, others: dict[str, Any], steps: int) -> None:
    assert rhythms(given, **others) == [steps] * 3


def test_a_time_is_no_number_of_steps_and_nothing_stays_nothing() -> None:
    assert rhythms(None) == [None] * 3
    config = config_with(eval_every=0)
    assert rhythms_in_steps(config, Rows(), 1)["train.eval_every"] == 0
    assert rhythms_in_steps(config, Rows(), 1)["checkpoint.every"] is None


def test_tokens_need_data_that_tells_them_and_each_setting_has_its_line() -> None:
    config = config_with(eval_every="5e6tokens", log_every="0.1epoch")
    config.checkpoint.every = "5tokens"
    with pytest.raises(ConfigError) as refused:
        require_rhythms(config, range(1000), 1)
    why = "the data does not tell how many tokens each of its sequences has; give a number of epochs or of steps"
    assert refused.value.problems == (f"train.eval_every=5e6tokens: {why}", f"checkpoint.every=5tokens: {why}")
    config.train.log_every = "never"  # which is told where settings are checked
    require_rhythms(config, range(1000), 1)
