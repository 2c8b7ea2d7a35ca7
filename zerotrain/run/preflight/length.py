"""The number of steps that a run of so many epochs or tokens comes to."""

import math
from collections.abc import Sized
from fractions import Fraction
from typing import Any

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.config.schema import Config
from zerotrain.config.words import word
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import MAX_INT, Natural, is_kind
from zerotrain.run.factory import batch_size_of, tokens_per_sequence
from zerotrain.settings import problems_in
from zerotrain.training.callbacks.checkpoints import OF_TRAINER


def take_max_steps(config: Config, data: Any, num_ranks: int, goes_on_from: Manifest | None) -> None:
    """Let `train.max_steps=null` be the steps that `train.num_epochs` or `train.max_tokens` come to, rounded up. A run
    that goes on with batches of another size has as many more as the rest of its sequences need.

    Args:
        data: of the run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: the data does not tell, the checkpoint is further than the run is to go, or there is no end.
    """
    train = config.train
    if train.max_steps is not None or problems_in(train):
        return
    num_sequences = _num_sequences(config, data.train)
    if num_sequences is None:
        return
    batch_size = batch_size_of(config, num_ranks)
    step, num_read = (0, 0) if goes_on_from is None else (goes_on_from.step, _num_read(goes_on_from, batch_size))
    num_steps = math.ceil((num_sequences - num_read) / batch_size)
    if num_steps < 0:
        raise ConfigError(
            f"{length_given(config)}: is {math.ceil(num_sequences):,} sequences, and the checkpoint to go on from has "
            f"been trained on {num_read:,}; give more"
        )
    if step + num_steps > MAX_INT:
        raise ConfigError(f"{length_given(config)}: is more steps than anybody can count, 2**63 or more; give fewer")
    train.max_steps = step + num_steps


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
    num_tokens = tokens_per_sequence(length_given(config), train, "train.num_epochs or train.max_steps")
    return Fraction(str(config.train.max_tokens)) / num_tokens


def _num_read(manifest: Manifest, batch_size: int) -> int:
    """Sequences that the run has read which saved a checkpoint."""
    # The extra of another loop than ours may be anything; the ranks say that it is none to go on from.
    found: Any = manifest.content["extra"]
    for name in (OF_TRAINER, "run", "data", "rows_consumed"):
        found = found.get(name) if isinstance(found, dict) else None
    return int(found) if is_kind(found, Natural) else manifest.step * batch_size
