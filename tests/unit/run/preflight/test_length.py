"""The steps that epochs and tokens come to."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.run.test_factory import ADAMW, COSINE, GPT, SYNTHETIC
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.config.schema import Config, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight
from zerotrain.preflight.check import take_max_steps

NUM_SEQUENCES = 1000


class Rows:
    """Sequences of 16 tokens each."""

    tokens_per_sequence = 16

    def __len__(self) -> int:
        return NUM_SEQUENCES


def config_with(**train: Any) -> Config:
    return Config(train=TrainConfig(**{"max_steps": None, "micro_batch_size": 4} | train))


def steps_of(config: Config, num_ranks: int = 1, goes_on_from: Manifest | None = None, rows: Any = None) -> int | None:
    take_max_steps(config, SimpleNamespace(train=rows or Rows()), num_ranks, goes_on_from)
    return config.train.max_steps


def saved(step: int, num_read: Any) -> Manifest:
    state = {"trainer": {"run": {"data": {"rows_consumed": num_read}}}}
    return Manifest({"files": [], "parameters": {}, "buffers": {}, "step": step, "extra": state})


@pytest.mark.parametrize(
    ("given", "num_ranks", "steps"),
    [
        ({"num_epochs": 1.0}, 1, 250),
        ({"num_epochs": 1.0, "micro_batch_size": 3}, 1, 334),
        ({"num_epochs": 2.0, "gradient_accumulation_steps": 5}, 2, 50),
        ({"num_epochs": 2.0, "virtual_ranks": 8}, 2, 63),
        ({"num_epochs": 1.1}, 1, 275),  # 1.1 * 1000 is 1100.0000000000002
        ({"num_epochs": 0.0001}, 1, 1),
        ({"max_tokens": 16_000.0}, 1, 250),
        ({"max_tokens": 16_001.0}, 1, 251),
        ({"max_tokens": 1.0}, 4, 1),
        ({"max_steps": 7}, 1, 7),
    ],
)
def test_a_length_is_rounded_up_to_whole_steps(given: dict[str, Any], num_ranks: int, steps: int) -> None:
    assert steps_of(config_with(**given), num_ranks) == steps


@pytest.mark.parametrize(
    ("num_epochs", "num_ranks", "step", "num_read", "steps"),
    [
        (2.0, 1, 100, 400, 500),  # batches of the same size: as many steps as from the first on
        (2.0, 4, 100, 400, 200),  # of four times the size: 1600 sequences are left
        (1.0, 1, 250, 1000, 250),
        (1.0, 3, 84, 1008, 84),  # the last batch has read some of the next epoch
        (1.0, 1, 10, "many", 250),
    ],
)
def test_a_run_that_goes_on_reads_the_sequences_that_are_left(
    num_epochs: float, num_ranks: int, step: int, num_read: Any, steps: int
) -> None:
    assert steps_of(config_with(num_epochs=num_epochs), num_ranks, saved(step, num_read)) == steps


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        steps_of(config_with(num_epochs=0.5), 1, saved(200, 800))
    told = "train.num_epochs=0.5: is 500 sequences, and the checkpoint to go on from has been trained on 800; give more"
    assert refused.value.problems == (told,)


def test_tokens_of_sequences_that_differ_are_refused() -> None:
    assert steps_of(config_with(num_epochs=1.0), rows=[0] * 8) == 2
    with pytest.raises(ConfigError, match=r"^train.max_tokens=100.0: the data does not tell how many tokens each"):
        steps_of(config_with(max_tokens=100.0), rows=[0] * 8)


@pytest.mark.parametrize("name", ["num_epochs", "max_tokens"])
def test_a_length_without_end_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^train\.{name}=1e\+300: is more steps than anybody can count, 2\*\*63 or "
    ):
        steps_of(config_with(**{name: 1e300}))


@pytest.mark.parametrize("wrong", [{"num_epochs": float("nan")}, {"num_epochs": -1.0}, {"micro_batch_size": 0}, {}])
def test_what_breaks_its_rule_is_left_to_who_says_so(wrong: dict[str, Any]) -> None:
    assert steps_of(config_with(**wrong)) is None


def test_the_check_before_a_run_works_the_steps_out() -> None:
    settings = Config(model=GPT, data=SYNTHETIC, optimizer=ADAMW, scheduler=COSINE)
    settings.train.max_steps, settings.train.num_epochs = None, 3.0
    preflight.check(settings, num_ranks=2)
    assert settings.train.max_steps == 12  # 3 x 64 sequences in batches of 16
    settings.train.max_steps = 5  # of an evaluation, which reads the settings of a run that is done
    preflight.check(settings)
    assert settings.train.max_steps == 5
