"""Rules on the values of a config: each with what is allowed, all broken ones reported at once."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig

from zerotrain.config.compose import to_config
from zerotrain.config.schema import Config
from zerotrain.config.targets import makes_callables, target_problems

OPEN_GROUPS = ("model", "data", "optimizer", "scheduler")
PARTIAL_GROUPS = ("optimizer", "scheduler")
"""Open groups whose target gets more arguments later: the parameters, the step."""


@dataclass(frozen=True)
class Rule:
    """What one setting may be."""

    setting: str
    allowed: str
    """Completes the sentence "it must be ..."."""
    holds: Callable[[Any], bool]


def _at_least(minimum: int) -> Callable[[Any], bool]:
    return lambda value: value >= minimum


def _one_of(*words: Any) -> Callable[[Any], bool]:
    return lambda value: value in words


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _or_null(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


def _is_initial_scale(value: float) -> bool:
    return 1 <= value <= 2**32 and math.frexp(value)[0] == 0.5


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pattern, str) and pattern for pattern in value)


def _is_units(value: Any) -> bool:
    return value == "auto" or (_are_patterns(value) and bool(value))


RULES = (
    Rule("seed", "between 0 and 2**63 - 1", lambda value: 0 <= value < 2**63),
    Rule("zero.stage", "0, 1, 2 or 3", _one_of(0, 1, 2, 3)),
    Rule("zero.bucket_mb", "a number of MiB above 0", _positive),
    Rule("zero.overlap", "true or false", _one_of(True, False)),
    Rule("zero.prefetch", "0 or more units", _at_least(0)),
    Rule("zero.reduction", "auto, ordered or native", _one_of("auto", "ordered", "native")),
    Rule("zero.units", "auto or a list of module name patterns such as [blocks.*]", _is_units),
    Rule("zero.reshard_after_forward", "true or false", _one_of(True, False)),
    Rule("precision.name", "fp32, bf16 or fp16", _one_of("fp32", "bf16", "fp16")),
    Rule("precision.keep_fp32", "a list of name patterns such as ['*norm*']", _are_patterns),
    Rule("precision.initial_scale", "a power of two from 1 to 2**32", _is_initial_scale),
    Rule("precision.growth_interval", "1 or more steps", _at_least(1)),
    Rule("model.compile", "true or false", _one_of(True, False)),
    Rule("model.activation_checkpointing", "true or false", _one_of(True, False)),
    Rule("train.max_steps", "1 or more steps", _at_least(1)),
    Rule("train.micro_batch_size", "1 or more sequences", _at_least(1)),
    Rule("train.gradient_accumulation_steps", "1 or more micro-batches", _at_least(1)),
    Rule("train.max_grad_norm", "a number above 0, or null for no clipping", _or_null(_positive)),
    Rule("train.on_nonfinite", "skip or stop", _one_of("skip", "stop")),
    Rule("train.max_skipped_steps", "1 or more steps", _at_least(1)),
    Rule("train.eval_every", "0 or more steps", _at_least(0)),
    Rule("train.eval_batches", "1 or more batches", _at_least(1)),
    Rule("train.log_every", "1 or more steps", _at_least(1)),
    Rule("train.sample_tokens", "0 or more tokens", _at_least(0)),
    Rule("train.profile", "true or false", _one_of(True, False)),
    Rule("train.memory_snapshot", "true or false", _one_of(True, False)),
    Rule("launch.nproc_per_node", "1 or more ranks, or null", _or_null(_at_least(1))),
    Rule("launch.device", "auto, cpu or cuda", _one_of("auto", "cpu", "cuda")),
    Rule("launch.threads_per_rank", "1 or more threads, or null", _or_null(_at_least(1))),
    Rule("launch.timeout_s", "a number of seconds above 0", _positive),
)

PRECISIONS_WITH_EFFECT = {
    "precision.keep_fp32": ("bf16", "fp16"),
    "precision.initial_scale": ("fp16",),
    "precision.growth_interval": ("fp16",),
}
"""Settings that only some precisions listen to."""

STAGES_WITH_EFFECT = {
    "zero.prefetch": frozenset({3}),
    "zero.reshard_after_forward": frozenset({3}),
}
"""Settings that only some stages listen to: these two move sharded parameters."""

NEEDS_SEVERAL_RANKS = (
    "zero.stage",
    "zero.bucket_mb",
    "zero.overlap",
    "zero.prefetch",
    "zero.reduction",
    "zero.units",
    "zero.reshard_after_forward",
)
"""Settings of what ranks send each other: one rank alone sends nothing."""


def checked_config(composed: DictConfig) -> tuple[Config, list[str]]:
    """Type what Hydra composed and check names, values, and the classes named by `_target_` with their arguments.

    Returns:
        The config, and one line for each problem: the setting, what it got, what is allowed, what to do.

    Raises:
        ConfigError: an interpolation leads nowhere, so that there is no config to check.
    """
    config, problems = to_config(composed)
    problems += value_problems(config)
    for group in OPEN_GROUPS:
        values = config.model_target if group == "model" else getattr(config, group)
        problems += _open_group_problems(values, group)
    return config, problems


def value_problems(config: Config) -> list[str]:
    """One line for each value that breaks its rule."""
    values_of = {rule: _value_of(config, rule.setting) for rule in RULES}
    problems = [_must_be(rule, got) for rule, got in values_of.items() if not _is_kept(rule, got)]
    if config.precision.name == "fp16" and config.train.on_nonfinite == "stop":
        problems.append(
            "train.on_nonfinite: got stop; it must be skip with precision=fp16, which finds its loss scale by overflows"
        )
    return problems


def must_be(setting: str, got: Any) -> str | None:
    """The line that says what `setting` must be instead of `got`; None where there is no rule for it."""
    return next((_must_be(rule, got) for rule in RULES if rule.setting == setting), None)


def without_effect(config: Config, world_size: int) -> list[str]:
    """One line for each setting that was changed from its default and changes nothing in this run."""
    lines = []
    for name in _changed(PRECISIONS_WITH_EFFECT, config):
        precisions = PRECISIONS_WITH_EFFECT[name]
        if config.precision.name not in precisions:
            got, wanted = config.precision.name, " or ".join(precisions)
            lines.append(f"{_shown(name, config)} has no effect with precision={got}; it has with {wanted}")
    if config.train.on_nonfinite == "stop":
        unheard = "has no effect with train.on_nonfinite=stop; it has with skip"
        lines += [f"{_shown(name, config)} {unheard}" for name in _changed(["train.max_skipped_steps"], config)]
    changed = _changed(NEEDS_SEVERAL_RANKS, config)
    if world_size == 1:
        advice = "has no effect with one rank; launch.nproc_per_node=2 starts two"
        return lines + [f"{_shown(name, config)} {advice}" for name in changed]
    for name in changed:
        stages = STAGES_WITH_EFFECT.get(name)
        if stages is not None and config.zero.stage not in stages:
            wanted = " or ".join(str(stage) for stage in sorted(stages))
            lines.append(f"{_shown(name, config)} has no effect at zero.stage={config.zero.stage}; it has at {wanted}")
    return lines


def doubtful(config: Config) -> list[str]:
    """One line for each pair of settings that trains, but hardly what is wanted."""
    pretrained = config.model.get("name_or_path")
    if pretrained is None or config.data.get("tokenizer", "") is not None:
        return []
    unseen = f"which model.name_or_path={pretrained} has never seen"
    return [f"data.tokenizer=null reads bytes, {unseen}; use data=tokenized"]


def _changed(names: Iterable[str], config: Config) -> list[str]:
    """Those of the settings that do not have their default."""
    return [name for name in names if attrgetter(name)(config) != attrgetter(name)(Config())]


def _open_group_problems(values: dict[str, Any], group: str) -> Iterator[str]:
    for name, number in _not_finite(values, prefix=group):
        yield f"{name}: got {number}; it must be a finite number"
    yield from target_problems(values, name=group)
    is_partial = values.get("_partial_") is True or makes_callables(values.get("_target_"))
    if group in PARTIAL_GROUPS and not is_partial:
        yield f"{group}._partial_: got {_word(values.get('_partial_'))}; it must be true"


def _value_of(config: Config, setting: str) -> Any:
    group, _, switch = setting.partition(".")
    return config.model_switches[switch] if group == "model" else attrgetter(setting)(config)


def _is_kept(rule: Rule, value: Any) -> bool:
    try:
        return rule.holds(value)
    except TypeError:  # a config made in Python may hold a value of any type
        return False


def _must_be(rule: Rule, got: Any) -> str:
    default = _value_of(Config(), rule.setting)
    return f"{rule.setting}: got {_word(got)}; it must be {rule.allowed}; the default is {_word(default)}"


def _shown(name: str, config: Config) -> str:
    return f"{name}={_word(attrgetter(name)(config))}"


def _word(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_finite(value: Any, *, prefix: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield prefix, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _not_finite(item, prefix=f"{prefix}.{key}")
