"""The steps that so many epochs or tokens come to between two evaluations, lines of metrics or checkpoints."""

from collections.abc import Sized
from typing import Any

from zerotrain.config.schema import Config, Rhythm
from zerotrain.errors import ConfigError
from zerotrain.settings import problems_in

RHYTHMS = ("train.eval_every", "train.log_every", "checkpoint.every")


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
            steps[name] = steps_of(f"{name}={given}", given, train, config, num_ranks)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return steps


def require_rhythms(config: Config, train: Sized, num_ranks: int) -> None:
    """Make sure that the data tells how many steps the rhythms of a run come to."""
    if not problems_in(config.train) and not problems_in(config.checkpoint):
        rhythms_in_steps(config, train, num_ranks)


def steps_of(told: str, given: Any, train: Sized, config: Config, num_ranks: int) -> int | None:
    """The steps that so many steps, tokens or epochs come to; 0 or None where it says so, and None of a time.

    Raises:
        ConfigError: the data does not tell; it begins with what was told.
    """
    rhythm = Rhythm.read(given)
    if rhythm is None or rhythm.unit == "seconds":
        return 0 if given == 0 else None
    if rhythm.unit == "steps":
        return int(rhythm.number)
    if rhythm.unit == "epochs":
        num_sequences = rhythm.number * len(train)
    else:
        num_sequences = rhythm.number / tokens_per_sequence(told, train, "a number of epochs or of steps")
    return max(1, round(num_sequences / batch_size_of(config, num_ranks)))


def batch_size_of(config: Config, num_ranks: int) -> int:
    """Sequences of a step, of all ranks."""
    train = config.train
    return (train.virtual_ranks or num_ranks) * train.gradient_accumulation_steps * train.micro_batch_size


def tokens_per_sequence(told: str, train: Sized, otherwise: str) -> int:
    """Tokens of each row; a ConfigError that begins with what was told where the data does not say."""
    num_tokens = getattr(train, "tokens_per_sequence", None)
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError(f"{told}: the data does not tell how many tokens each of its sequences has; give {otherwise}")
    return num_tokens
