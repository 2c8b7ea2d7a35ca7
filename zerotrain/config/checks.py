"""Finds all invalid values of a config at once, and settings without effect. A field's rule and the condition of its
effect stand at the field, in `zerotrain.config.schema` and `zerotrain.settings`.
"""

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from zerotrain.config.compose import to_config
from zerotrain.config.interpolation import nested
from zerotrain.config.schema import LENGTHS, Config, DataSwitches, ModelSwitches, OptimizerSwitches, TrainConfig
from zerotrain.config.targets import makes_callables, target_problems
from zerotrain.config.words import word
from zerotrain.settings import Setting, autos_of, settings_in

OPEN_GROUPS = ("model", "data", "optimizer", "scheduler")
CALLBACKS = "callbacks"
COLLATE_FN = "data.collate_fn"
SETS = "data.validation_sets"
PARTIAL_GROUPS = ("optimizer", "scheduler", COLLATE_FN)
"""These get more arguments later: the parameters, the step, the items."""
MAX_MICRO_BATCHES = 2**20
"""Of a step, on all ranks: more have too many noughts."""


def checked_config(composed: DictConfig) -> tuple[Config, list[str]]:
    """Type what Hydra composed and check names, values, and the classes named by `_target_` with their arguments.

    Returns:
        The config, and one line for each problem: the setting, what it got, what is allowed, what to do.

    Raises:
        ConfigError: an interpolation leads nowhere, so that there is no config to check.
    """
    config, problems = to_config(composed)
    problems += value_problems(config) + length_problems(config)
    if config.train.num_epochs is not None or config.train.max_tokens is not None:
        config.train.max_steps = None  # until the data has told it, see `zerotrain.run.preflight.length`
    return config, problems + class_problems(config) + callback_problems(config)


def class_problems(config: Config) -> list[str]:
    """One line for each thing that keeps the classes which a config names from being built."""
    problems: list[str] = []
    targets = {"model": config.model_target, "data": config.data_target, "optimizer": config.optimizer_target}
    for group in OPEN_GROUPS:
        values = targets.get(group, getattr(config, group))
        if group == "model" and values.get("vocab_size", 0) is None:
            values = values | {"vocab_size": 1}  # until the data has said how many tokens it has
        problems += _open_group_problems(values, group)
    collate = config.data_switches["collate_fn"]
    if isinstance(collate, dict) and "_target_" in collate:
        problems += _open_group_problems(collate, COLLATE_FN)
    for name, values in config.validation_set_targets.items():
        problems += _open_group_problems(values, f"{SETS}.{name}")
    return problems


def callback_problems(config: Config) -> list[str]:
    """Likewise of the callbacks, which a run alone has."""
    problems: list[str] = []
    for name, values in config.callback_targets.items():
        called = f"{CALLBACKS}.{name}"
        if not isinstance(values, dict):
            problems.append(f"{called}: got {word(values)}; it must be a class with its arguments, or null")
        elif values.get("_partial_"):
            problems.append(f"{called}._partial_: got {word(values['_partial_'])}; leave it out")
        else:
            problems += _open_group_problems(values, called)
    return problems


def value_problems(config: Config) -> list[str]:
    """One line for each value that breaks its rule, or a rule across settings."""
    given = _settings_of(config)
    problems = [setting.must_be(name, value, word) for name, setting, value in given if not setting.allows(value)]
    if config.precision.name == "fp16" and config.train.on_nonfinite == "stop":
        problems.append(
            "train.on_nonfinite: got stop; it must be skip with precision=fp16, which finds its loss scale by overflows"
        )
    train = config.train
    if train.gradient_accumulation_steps * (train.virtual_ranks or 1) > MAX_MICRO_BATCHES:
        problems.append(
            f"train.virtual_ranks: got {train.virtual_ranks} with train.gradient_accumulation_steps="
            f"{train.gradient_accumulation_steps}; a step must have {MAX_MICRO_BATCHES} micro-batches or fewer"
        )
    if config.zero.schedule is not None:
        problems += [
            f"{name}: got auto with zero.schedule={word(config.zero.schedule)}; it must be a value with a schedule; "
            "leave one of them out"
            for name in autos_of(config)
        ]
    if all(getattr(config.train, name) is None for name in LENGTHS):
        problems.append(
            "train.max_steps: got null; it must be a number of steps without train.num_epochs or max_tokens"
        )
    return problems


def length_problems(config: Config) -> list[str]:
    """A line where a run as it was given has two lengths. The default of `train.max_steps` counts as none."""
    given = [
        f"{name}={word(value)}"
        for name, setting, value in _settings_of(config)
        if name.removeprefix("train.") in LENGTHS and value is not None and setting.allows(value)
    ]
    if config.train.max_steps == TrainConfig().max_steps:
        given.remove(f"train.max_steps={config.train.max_steps}")
    if len(given) < 2:
        return []
    told = ", ".join(given)
    return [f"{told}: a run has one length; leave out the others, or give them null"]


def must_be(name: str, got: Any) -> str | None:
    """The line that says what a setting must be instead of `got`; None where there is no rule for it."""
    known = {name: setting for name, setting, _ in _settings_of(Config())}
    return known[name].must_be(name, got, word) if name in known else None


def without_effect(config: Config, world_size: int) -> list[str]:
    """One line for each setting that was changed from its default and changes nothing in this run."""
    lines = []
    for name, setting, value in _settings_of(config):
        lacking = [effect for effect in setting.effects if not effect.holds(config, world_size)]
        if lacking and value != setting.default:
            why = lacking[0].otherwise.format_map(vars(config))
            lines.append(f"{name}={word(value)} has no effect {why}")
    return lines


def doubtful(config: Config) -> list[str]:
    """One line for each pair of settings that trains, but hardly what is wanted."""
    lines = []
    pretrained, last = config.model.get("name_or_path"), max(config.zero.stages)
    if pretrained is not None and config.data.get("tokenizer", "") is None:
        unseen = f"which model.name_or_path={pretrained} has never seen"
        lines.append(f"data.tokenizer=null reads bytes, {unseen}; use data=tokenized")
    if config.train.max_steps is not None and last >= config.train.max_steps:
        lines.append(f"zero.schedule: step {last} is not reached with train.max_steps={config.train.max_steps}")
    return lines


def _settings_of(config: Config) -> Iterator[tuple[str, Setting, Any]]:
    """(dotted name, setting, value) of all settings but the arguments of the open groups."""
    yield from settings_in(config)
    yield from settings_in(ModelSwitches(**config.model_switches), "model.")
    yield from settings_in(DataSwitches(**config.data_switches), "data.")
    yield from settings_in(OptimizerSwitches(**config.optimizer_switches), "optimizer.")


def _open_group_problems(values: dict[str, Any], group: str) -> Iterator[str]:
    for name, value in nested(values, group):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: got {value}; it must be a finite number"
    is_partial = values.get("_partial_") is True or makes_callables(values.get("_target_"))
    if group in PARTIAL_GROUPS and not is_partial:
        yield f"{group}._partial_: got {word(values.get('_partial_'))}; it must be true"
        values = values | {"_partial_": True}  # what comes later is not missing now
    yield from target_problems(values, name=group)
