"""All that can be tried of a config before any rank starts."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.world import choose_device
from zerotrain.config.compose import first_line
from zerotrain.config.schema import Config
from zerotrain.config.targets import HYDRA_KEYS
from zerotrain.config.words import word, words_of_config
from zerotrain.data.fetch import RowError
from zerotrain.data.fingerprint import Fingerprint, fingerprint_of
from zerotrain.data.items import first_batches, ids_of, require_next_tokens, require_taken
from zerotrain.engine.groups.optimizer_factory import SAMPLE_SHAPE, build_optimizer, needing_whole
from zerotrain.engine.groups.trial import Trials
from zerotrain.engine.model_checks import require_plain, require_trainable
from zerotrain.engine.one_memory import require_own_memory
from zerotrain.engine.options import leaves_per_rank
from zerotrain.engine.precision.kept_fp32 import dtypes_of
from zerotrain.engine.precision.policy import precision_named
from zerotrain.engine.state.fit import model_misfits
from zerotrain.engine.unit_forward import replace_forwards
from zerotrain.errors import ConfigError
from zerotrain.factory import build, build_collate, build_on_meta, ended_in, in_group, optimizers_of_no_compiler
from zerotrain.sharding.units import cut_units, model_parameters

SETS = ("train", "validation")
MIN_SEQUENCES = 1024
"""As many a rank may read in a step though the data has fewer, to learn a few by heart."""


def check(
    config: Config, num_local_ranks: int = 1, num_ranks: int = 1, goes_on_from: Manifest | None = None
) -> Fingerprint:
    """Build what can be built without ranks: the model without memory, the dataset, the optimizer of one element.

    Called once, before any rank starts; it also fills the dataset's cache, so that the ranks find it there.

    Args:
        config: gets what the dataset alone knows: `model.vocab_size`, where it is null.
        num_local_ranks: ranks this machine is to run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.

    Returns:
        What the data is, for the ranks to compare theirs with.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []

    def attempt(group: str, attempted: Callable[[Config], Any]) -> Any:
        """What `attempted` gives; None after a problem."""
        try:
            with words_of_config():
                return attempted(config)
        except ConfigError as error:
            problems.extend(error.problems)
        except RowError as error:
            problems.append(_of_row(error))
        except (ValueError, TypeError, LookupError, OSError) as error:
            problems.append(in_group(group, error, getattr(config, group)))
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            problems.append(_too_large(group, error))
        except SystemExit as ending:
            problems.append(ended_in(group, ending, getattr(config, group)))

    device = attempt("launch", lambda config: choose_device(config.launch.device, num_local_ranks - 1))
    attempt("train", lambda config: leaves_per_rank(config.train.virtual_ranks, num_ranks, config.zero.accumulate))
    data = attempt("data", _dataset)
    batches = None if data is None else attempt("data", lambda config: _first_batches(data, config))
    fingerprint = None if batches is None else attempt("data", lambda config: fingerprint_of(data, seed=config.seed))
    model = None
    if _take_vocab_size(config, data):
        model = attempt("model", lambda config: _require_module(build_on_meta(config), config))
    can_train = model is not None and attempt("model", lambda config: _try_model(model, config))
    if model is not None and can_train and goes_on_from is not None:
        problems += [f"checkpoint.resume: {line}" for line in model_misfits(goes_on_from, model_parameters(model))]
    if model is not None and can_train and batches is not None:
        attempt("data", lambda _: _require_fit(model, data, batches))
    if batches is not None:
        attempt("train", lambda config: _require_enough(data, config))
    attempt("optimizer", _naming_the_argument("optimizer", lambda config: _try_optimizer(model, config, device)))
    attempt("scheduler", _naming_the_argument("scheduler", _try_schedule))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))  # the model and the optimizer may both stumble over a pattern
    return fingerprint or {}


def prepare_data(config: Config) -> None:
    """Let the data be made that lies in a cache of this machine.

    Raises:
        ConfigError: it cannot.
    """
    with words_of_config():
        _dataset(config)


def _take_vocab_size(config: Config, data: Any) -> bool:
    """Let `model.vocab_size=null` be as many tokens as the data has; False while nobody knows, since the data could not
    be built."""
    if config.model.get("vocab_size", 0) is None and isinstance(known := getattr(data, "vocab_size", None), int):
        config.model["vocab_size"] = known
    return data is not None or config.model.get("vocab_size", 0) is not None


def _naming_the_argument(group: str, attempted: Callable[[Config], Any]) -> Callable[[Config], Any]:
    """The same attempt, in whose errors the argument is named without which there is none."""

    def attempt(config: Config) -> Any:
        try:
            return attempted(config)
        except (ConfigError, ValueError, TypeError, LookupError) as error:
            values = getattr(config, group)
            line = error.problems[0] if isinstance(error, ConfigError) else in_group(group, error, values)
            for name in values.keys() - HYDRA_KEYS if line.startswith(f"{group}: ") else ():
                without: Any = {group: {key: value for key, value in values.items() if key != name}}
                if _passes(attempted, replace(config, **without)):
                    reason = line.removeprefix(f"{group}: ")
                    raise ConfigError(f"{group}.{name}: got {word(values[name])}; {reason}") from error
            raise

    return attempt


def _passes(attempted: Callable[[Config], Any], config: Config) -> bool:
    try:
        attempted(config)
    except Exception:  # of a user's class, which gets fewer arguments than it may need
        return False
    return True


def _dataset(config: Config) -> Any:
    """The data.

    Raises:
        ConfigError: it is no data at all.
    """
    data, path = build("data", config.data_target), config.data.get("_target_")
    for name in SETS:
        if getattr(data, name, None) is None:
            raise ConfigError(
                f"data._target_: got {path}, which makes a {type(data).__name__} with no dataset called {name}; it "
                "must make an object with train and validation, each with a length and (inputs, labels) by number"
            )
    return data


def _first_batches(data: Any, config: Config) -> list[list[Any]]:
    """The first items of each of `SETS`, as batches of one."""
    collate = build_collate(config)
    return [first_batches(getattr(data, name), f"data.{name}", seed=config.seed, collate=collate) for name in SETS]


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _too_large(group: str, error: Exception) -> str:
    return f"{group}: needs more memory than there is: {first_line(error)}; choose smaller values"


def _of_row(error: RowError) -> str:
    """What the user's class or function raised, and where in its code."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if _lacks_memory(cause):
        return _too_large("data", cause)
    *_, frame = traceback.extract_tb(cause.__traceback__)
    return f"{str(error).splitlines()[0]} ({frame.filename}, line {frame.lineno})"


def _try_schedule(config: Config) -> None:
    """Ask the schedule for a factor.

    Raises:
        ConfigError: it gives something else.
    """
    factor = build("scheduler", config.scheduler)(0, config.train.max_steps)
    if not isinstance(factor, int | float):
        raise ConfigError(
            f"scheduler._target_: got {config.scheduler.get('_target_')}, which gives a {type(factor).__name__} for "
            "(0, max_steps); it must give a number, the factor on the learning rate"
        )


def _require_module(model: Any, config: Config) -> Any:
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_: got {config.model.get('_target_')}, which makes a {type(model).__name__}; it must make a "
            "torch.nn.Module"
        )
    return model


def _try_model(model: nn.Module, config: Config) -> bool:
    """Look whether the switches and the patterns of the config can be followed in a model without memory: True."""
    try:
        require_plain(model)
        require_own_memory(model)
    except ConfigError as error:
        raise ConfigError(*(f"model: {problem}" for problem in error.problems)) from error
    parameters = model_parameters(model)
    require_trainable(model, parameters)
    dtypes_of(parameters, precision_named(config.precision.name, tuple(config.precision.keep_fp32)))
    replace_forwards(model, units=config.zero.unit_patterns, **config.model_switches)
    return True


def _try_optimizer(model: nn.Module | None, config: Config, device: torch.device | None) -> None:
    """Let the optimizer choose what it needs whole of the model without memory, and build it for one tensor of each.
    For the CPU let it make some steps; on a GPU the ranks do, since this process is to leave none of its memory there.
    """
    factory = build("optimizer", config.optimizer)
    units = [] if model is None else cut_units(model, model_parameters(model), config.zero.unit_patterns, max_numel=1)
    with optimizers_of_no_compiler():
        with suppress(ValueError):  # which build_optimizer has a sentence for
            _require_optimizer(factory([{"params": [torch.zeros(SAMPLE_SHAPE)], "name": "matrices"}]), config)
        names = {"whole matrices"} if model is not None and needing_whole(factory, units) else set()
        for name in names | {"matrices"} if hasattr(factory, "needs_whole") else names or {"matrices"}:
            given = {"params": [torch.zeros(SAMPLE_SHAPE)], "name": name}
            made = build_optimizer(factory, [given])
            if device is not None and device.type == "cpu":
                settings = {key: value for key, value in made.param_groups[0].items() if key != "params"}
                Trials(factory, device).require_fit(settings)


def _require_optimizer(made: object, config: Config) -> None:
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer._target_: got {config.optimizer.get('_target_')}, which makes a {type(made).__name__}; it must "
            "make a torch.optim.Optimizer"
        )


def _require_fit(model: nn.Module, data: Any, batches: Sequence[Sequence[Any]]) -> None:
    """Check that the model takes the items, knows all tokens and positions of the data, where both tell how many there
    are, and that its labels are of the model's kind.

    Args:
        batches: the first items of each of `SETS`.

    Raises:
        ConfigError: with the tokens or positions it does not know.
        ValueError: the labels are of another kind.
    """
    problems, kind = [], type(model).__name__
    known, given = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(known, int) and isinstance(given, int) and given > known:
        problems.append(
            f"data.vocab_size={given}, but {kind} knows {known} tokens; choose data in the model's own tokens, such as "
            "data=tokenized, or a model with as many"
        )
    known = getattr(model, "max_seq_len", None)
    ids = ids_of(batches[0][0])
    if isinstance(known, int) and ids is not None and ids.ndim and (given := ids.shape[-1]) > known:
        problems.append(
            f"data.seq_len={given}, but {kind} knows {known} positions; choose data.seq_len={known} or less or a "
            f"model with more (model.max_seq_len={given}; transformers: +model.config.max_position_embeddings={given})"
        )
    if problems:
        raise ConfigError(*problems)
    for name, each in zip(SETS, batches, strict=True):
        require_taken(each, f"data.{name}", model)
        if getattr(model, "next_token_labels", False):
            require_next_tokens(each, f"data.{name}", model=kind, vocab_size=getattr(model, "vocab_size", None))


def _require_enough(data: Any, config: Config) -> None:
    """Check that a step does not read the data many times over: all that a rank reads in it lies in memory at once.

    Raises:
        ConfigError: it would.
    """
    train, most = config.train, max(len(data.train), MIN_SEQUENCES)
    per_rank = train.micro_batch_size * train.gradient_accumulation_steps
    if per_rank > most:
        name = "micro_batch_size" if train.micro_batch_size > most else "gradient_accumulation_steps"
        raise ConfigError(
            f"train.{name}: got {getattr(train, name)}; a rank would read {per_rank} sequences in a step, and the data "
            f"has {len(data.train)}; train.micro_batch_size x train.gradient_accumulation_steps must be {most} or less"
        )
