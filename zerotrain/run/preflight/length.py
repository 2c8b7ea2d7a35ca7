"""The number of steps that so many epochs or tokens come to: of a run, and between two evaluations."""

import math
from collections.abc import Sized
from fractions import Fraction
from typing import Any

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.config.rhythm import Rhythm
from zerotrain.config.schema import Config
from zerotrain.config.words import word
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Natural
from zerotrain.settings import problems_in
from zerotrain.training.callbacks.checkpoints import OF_TRAINER

RHYTHMS = ("train.eval_every", "train.log_every", "checkpoint.every")


def take_max_steps(config: Config, data: Any, num_ranks: int, goes_on_from: Manifest | None) -> None:
    """Let `train.max_steps=null` be the steps that `train.num_epochs` or `train.max_tokens` come to, rounded up. A run
    that goes on with batches of another size has as many more as the rest of its sequences need.

    Args:
        data: of the run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: the data does not tell, or the checkpoint is further than the run is to go.
    """
    train = config.train
    if train.max_steps is not None or problems_in(train):
        return
    num_sequences = _num_sequences(config, data.train)
    if num_sequences is None:
        return
    batch_size = _batch_size(config, num_ranks)
    step, num_read = (0, 0) if goes_on_from is None else (goes_on_from.step, _num_read(goes_on_from, batch_size))
    num_steps = math.ceil((num_sequences - num_read) / batch_size)
    if num_steps < 0:
        raise ConfigError(
            f"{length_given(config)}: is {math.ceil(num_sequences):,} sequences, and the checkpoint to go on from has "
            f"been trained on {num_read:,}; give more"
        )
    train.max_steps = step + num_steps


def rhythms_in_steps(config: Config, train: Sized, num_ranks: int) -> dict[str, int | None]:
    """The steps that each of `RHYTHMS` comes to with this data and global batch, rounded, at least 1; 0 or None where
    it says so, and None of a time.

    Raises:
        ConfigError: the data does not tell, with a line for each.
    """
    steps: dict[str, int | None] = {}
    problems: list[str] = []
    for name in RHYTHMS:
        group, _, field = name.partition(".")
        given = getattr(getattr(config, group), field)
        try:
            steps[name] = _steps_of(f"{name}={given}", given, train, _batch_size(config, num_ranks))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return steps


def require_rhythms(config: Config, train: Sized, num_ranks: int) -> None:
    """Make sure that the data tells how many steps the rhythms of a run come to."""
    if not problems_in(config.train) and not problems_in(config.checkpoint):
        rhythms_in_steps(config, train, num_ranks)


def _steps_of(told: str, given: Any, train: Sized, batch_size: int) -> int | None:
    rhythm = Rhythm.read(given)
    if rhythm is None or rhythm.unit == "seconds":
        return 0 if given == 0 else None
    if rhythm.unit == "steps":
        return int(rhythm.number)
    if rhythm.unit == "epochs":
        num_sequences = rhythm.number * len(train)
    else:
        num_sequences = rhythm.number / _tokens_per_sequence(told, train, "a number of epochs or of steps")
    return max(1, round(num_sequences / batch_size))


def _batch_size(config: Config, num_ranks: int) -> int:
    """Sequences of a step, of all ranks."""
    train = config.train
    return (train.virtual_ranks or num_ranks) * train.gradient_accumulation_steps * train.micro_batch_size


def length_given(config: Config) -> str:
    """The setting from which the number of steps follows, with its value."""
    name = "max_tokens" if config.train.num_epochs is None else "num_epochs"
    return f"train.{name}={word(getattr(config.train, name))}"


def _num_sequences(config: Config, train: Sized) -> Fraction | None:
    """Sequences of the run; None where nothing says how long it is. From the decimals that were given: 1.1 times 1000
    is 1100, and not a little more."""
    if config.train.num_epochs is not None:
        return Fraction(str(config.train.num_epochs)) * len(train)
    if config.train.max_tokens is None:
        return None
    num_tokens = _tokens_per_sequence(length_given(config), train, "train.num_epochs or train.max_steps")
    return Fraction(str(config.train.max_tokens)) / num_tokens


def _tokens_per_sequence(told: str, train: Sized, otherwise: str) -> int:
    num_tokens = getattr(train, "tokens_per_sequence", None)
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError(f"{told}: the data does not tell how many tokens each of its sequences has; give {otherwise}")
    return num_tokens


def _num_read(manifest: Manifest, batch_size: int) -> int:
    """Sequences that the run has read which saved a checkpoint."""
    # The extra of another loop than ours may be anything; the ranks say that it is none to go on from.
    found: Any = manifest.content["extra"]
    for name in (OF_TRAINER, "run", "data", "rows_consumed"):
        found = found.get(name) if isinstance(found, dict) else None
    return manifest.step * batch_size if Natural().problem(found) else int(found)
