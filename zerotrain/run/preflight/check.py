"""All that can be tried of a config before any rank starts."""

import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.world import choose_device
from zerotrain.config.checks import HYDRA_KEYS
from zerotrain.config.compose import first_paragraph
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.config.words import in_words_of_config, word, words_of_config
from zerotrain.data.fetch import Fingerprint, RowError, fingerprint_of
from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.home import NOT_ON_HOST
from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE, build_optimizer, needing_whole
from zerotrain.engine.groups.probe import probe
from zerotrain.engine.model.checks import require_own_memory, require_plain, require_trainable
from zerotrain.engine.model.forward import replace_forwards, require_units
from zerotrain.engine.model.precision import dtypes_of, precision_named
from zerotrain.engine.options import leaves_per_rank
from zerotrain.engine.state.from_checkpoint import model_misfits
from zerotrain.engine.state.from_weights import weight_misfits
from zerotrain.errors import ConfigError
from zerotrain.run.factory import (
    TOO_LARGE_A_TENSOR,
    build_on_meta,
    build_optimizer_factory,
    ended_in,
    freeze,
    frozen_steps,
    in_group,
    require_groups,
    require_rhythms,
    try_schedule,
)
from zerotrain.run.preflight.data import (
    dataset_of,
    first_batches_of,
    require_asked_for,
    require_callbacks_fit,
    require_fit,
    require_loss_over,
    validation_sets_of,
)
from zerotrain.run.preflight.length import take_max_steps
from zerotrain.run.preflight.memory_room import Room, refusing_too_large, require_memory, require_rows
from zerotrain.run.preflight.room import Ranks, require_room
from zerotrain.sharding.units import cut_units, model_parameters, walk
from zerotrain.training.callbacks.stages import stage_at, stages_from


def check(
    config: Config,
    num_local_ranks: int = 1,
    num_ranks: int = 1,
    goes_on_from: Manifest | None = None,
    run_dir: Path | None = None,
    like: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Build what can be built without ranks: the model without memory, the dataset, the optimizer of one element.

    Called once, before any rank starts; it also fills the dataset's cache, where the ranks find it.

    Args:
        config: gets the dataset's `model.vocab_size` if that is null, and `train.max_steps` likewise.
        num_local_ranks: ranks this machine is to run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.
        run_dir: may not be there yet.
        like: see `fingerprint_of`.

    Returns:
        The fingerprint of the data, for the ranks to compare theirs with.

    Raises:
        ConfigError: with every problem found.
    """
    attempts = _Attempts(config)
    attempt, problems = attempts.attempt, attempts.problems
    device = attempt("launch", lambda config: choose_device(config.launch.device, num_local_ranks - 1))
    attempt("train", lambda config: leaves_per_rank(config.train.virtual_ranks, num_ranks, config.zero.accumulate))
    data = attempt("data", dataset_of)
    ranks, room = Ranks(num_ranks, num_local_ranks), _room(config, device, num_local_ranks)
    with refusing_too_large(config, ranks, room):
        model = attempt("model", _require_module) if _take_vocab_size(config, data) else None
    sets = None if data is None else attempt("data", lambda config: validation_sets_of(data, config))
    batches = None if sets is None else attempt("data", lambda config: _first_batches(data, sets, config, ranks, room))
    known = None if batches is None else attempt("data", lambda config: fingerprint_of(data, config.seed, sets, like))
    frozen = None if model is None else attempt("model", lambda config: _try_model(model, config))
    if model is not None and frozen is not None:
        problems += _start_misfits(model, config.checkpoint, goes_on_from)
        if batches is not None:
            attempt("data", lambda _: require_fit(model, data, batches))
            if not problems and not config.plan.only:
                attempt("train", lambda config: require_loss_over(model, data, batches["data.train"][0], config))
    if batches is not None:
        attempt("train", lambda config: require_asked_for(data, config))
        attempt("train", lambda config: take_max_steps(config, data, num_ranks, goes_on_from))
        attempt("train", lambda config: require_rhythms(config, data.train, num_ranks))
        attempt("model", lambda config: frozen_steps(config, frozen or {}, data.train, num_ranks))
    num_problems = len(problems)
    trying = _naming_the_argument("optimizer", lambda config: _try_optimizer(model, config, device))
    if (factory := attempt("optimizer", trying)) is not None and model is not None and frozen is not None:
        attempt("optimizer", lambda config: require_groups(config, walk(model), factory, device, goes_on_from))
    sized = model if len(problems) == num_problems and not config.plan.only else None
    attempt("offload", lambda config: require_room(config, sized, run_dir, ranks))
    if sized is not None and batches is not None and not problems:
        stages, first = _stages_to_come(goes_on_from, config), batches["data.train"][0]
        attempt("model", lambda config: require_memory(config, sized, factory, first, ranks, room, stages))
    attempt("scheduler", _naming_the_argument("scheduler", try_schedule))
    attempt("callbacks", lambda config: require_callbacks_fit(data, sets or {}, config, model, batches))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))  # the model and the optimizer may both stumble over a pattern
    return known or {}


class _Attempts:
    """Attempts to build parts of a config, and the problems found."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.problems: list[str] = []

    def attempt(self, group: str, attempted: Callable[[Config], Any]) -> Any:
        """The result of `attempted`; None after a problem."""
        config, problems = self._config, self.problems
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


def _room(config: Config, device: torch.device | None, num_local: int) -> Room:
    """Room for anything before a plan, which tells itself what does not fit."""
    return Room(math.inf, math.inf) if config.plan.only else Room.of_machine(device, num_local)


def _first_batches(data: Any, sets: dict[str, Any], config: Config, ranks: Ranks, room: Room) -> dict[str, list[Any]]:
    if isinstance(length := getattr(data.train, "tokens_per_sequence", None), int):
        require_rows(config, length * torch.int64.itemsize, len(data.train), ranks, room)
    return first_batches_of(data, sets, config)


def _start_misfits(model: nn.Module, checkpoint: CheckpointConfig, goes_on_from: Manifest | None) -> list[str]:
    """A line for each kind of what does not fit the model of what the run begins with, as names and shapes tell."""
    if goes_on_from is not None:
        return [f"checkpoint.resume: {line}" for line in model_misfits(goes_on_from, model_parameters(model))]
    if checkpoint.init_from is None or not checkpoint.strict:
        return []
    lines = weight_misfits(checkpoint.init_from, model)
    return [f"checkpoint.init_from: {in_words_of_config(line)}" for line in lines]


def _stages_to_come(goes_on_from: Manifest | None, config: Config) -> list[int]:
    stages, step = stages_from(goes_on_from, config.zero.stages)
    last = config.train.max_steps or 0
    later = [stages[each] for each in stages if step < each < last]
    return list(dict.fromkeys([stage_at(stages, step), *later]))


def prepare_data(config: Config) -> None:
    """Let the data be made that lies in a cache of this machine; ConfigError where it cannot be."""
    with words_of_config():
        validation_sets_of(dataset_of(config), config)


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


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in ("allocate memory", TOO_LARGE_A_TENSOR))


def _too_large(group: str, error: Exception) -> str:
    return f"{group}: needs more memory than there is: {first_paragraph(error)}; choose smaller values"


def _of_row(error: RowError) -> str:
    """The error of the user's class or function, and its place in the user's code."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if _lacks_memory(cause):
        return _too_large("data", cause)
    *_, frame = traceback.extract_tb(cause.__traceback__)
    return f"{str(error).splitlines()[0]} ({frame.filename}, line {frame.lineno})"


def _require_module(config: Config) -> nn.Module | None:
    model = build_on_meta(config)
    if model is not None:
        _require_kind("model", config.model, model, nn.Module, "torch.nn.Module")
    return model


def _require_kind(group: str, values: dict[str, Any], made: object, kind: type, called: str) -> None:
    if not isinstance(made, kind):
        path, got = values.get("_target_"), type(made).__name__
        raise ConfigError(f"{group}._target_: got {path}, which makes a {got}; it must make a {called}")


def _try_model(model: nn.Module, config: Config) -> dict[str, Any]:
    """Look whether the switches and the patterns of the config can be followed in a model without memory. Returns what
    `freeze` does."""
    frozen = freeze(config, model)
    walked = walk(model)
    try:
        require_plain(walked)
        require_own_memory(walked)
    except ConfigError as error:
        raise ConfigError(*(f"model: {problem}" for problem in error.problems)) from error
    require_trainable(model, trains=any(each.parameter.requires_grad for each in walked.managed))
    dtypes_of(walked.managed, precision_named(config.precision.name, tuple(config.precision.keep_fp32)))
    replace_forwards(model, units=config.zero.unit_patterns, **config.forward_switches)
    if config.offload.activations != "device":
        require_units(walked, config.zero.unit_patterns, f"offload.activations={config.offload.activations}")
    return frozen


def _try_optimizer(model: nn.Module | None, config: Config, device: torch.device | None) -> Any:
    """Let the optimizer choose what it needs whole of the model without memory, and build it for one tensor of each.
    For the CPU let it make some steps; on a GPU the ranks do, since this process is to leave none of its memory there.

    Returns:
        The optimizer's factory.
    """
    factory = build_optimizer_factory(config)
    units = [] if model is None else cut_units(walk(model), config.zero.unit_patterns, max_numel=1)
    with suppress(ValueError):  # which build_optimizer has a sentence for
        made = factory([{"params": [torch.zeros(SAMPLE_SHAPE)], "name": "matrices"}])
        _require_kind("optimizer", config.optimizer, made, torch.optim.Optimizer, "torch.optim.Optimizer")
    names = {"whole matrices"} if model is not None and needing_whole(factory, units) else set()
    if names and config.offload.optimizer != "device" and config.offload.update == "host":
        raise ConfigError(NOT_ON_HOST)
    for name in names | {"matrices"} if hasattr(factory, "needs_whole") else names or {"matrices"}:
        given = {"params": [torch.zeros(SAMPLE_SHAPE)], "name": name}
        made = build_optimizer(factory, [given])
        if device is not None and device_of(device).is_host:
            settings = {key: value for key, value in made.param_groups[0].items() if key != "params"}
            probe(factory, settings, device)
    return factory
