"""Settings that may be `auto`: which values there are to choose from, and a config with those that were chosen."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import isqrt
from typing import Any

from zerotrain.config.compose import digest, noted
from zerotrain.config.schema import Config
from zerotrain.settings import AUTO, autos_of

STAGE, MICRO_BATCH = "zero.stage", "train.micro_batch_size"
TIERS = ("offload.optimizer", "offload.parameters", "offload.activations")
_ACCUMULATION = "train.gradient_accumulation_steps"
_VALUES: Mapping[str, tuple[Any, ...]] = {
    STAGE: (0, 1, 2, 3),
    "model.activation_checkpointing": (False, True),
    **dict.fromkeys(TIERS, ("device", "cpu", "disk")),
}
_ORDER = (*reversed(TIERS), "model.activation_checkpointing", MICRO_BATCH)
"""Settings: the last is the first to give way."""
_OF_A_PLAN = ("zero", "precision", "offload", "model", "data", "optimizer")
_OF_A_STEP = ("micro_batch_size", "gradient_accumulation_steps", "virtual_ranks")


def unchosen_problems(config: Config) -> list[str]:
    """A line for each `auto` where there is no run that it could be chosen for."""
    return [f"{name}: got auto, which is chosen as a run starts; it must be a value here" for name in autos_of(config)]


def allowed(config: Config, name: str) -> tuple[Any, ...]:
    """The values that a run may get for `auto`: those that take less time and more memory first, but for stages, whose
    plans tell it. Micro-batches are of equal size, so that the global batch stays."""
    if name != MICRO_BATCH:
        return _VALUES[name]
    rows = _rows_of_a_step(config)
    small = [size for size in range(1, isqrt(rows) + 1) if not rows % size]
    return tuple(sorted({*small, *(rows // size for size in small)}, reverse=True))


def _rows_of_a_step(config: Config) -> int:
    """Sequences of a virtual rank in a step."""
    size, num = config.train.micro_batch_size, max(1, config.train.gradient_accumulation_steps)
    return num if size == AUTO else num * int(size)


def values_in(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """The values that a config has of some settings."""
    values = {}
    for name in names:
        group, _, field = name.partition(".")
        held: Any = getattr(config, group)
        values[name] = held.get(field) if isinstance(held, dict) else getattr(held, field)
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The same config with other values of some settings; `config` stays as it is, and so does the global batch."""
    values = dict(values)
    if size := values.get(MICRO_BATCH):
        values[_ACCUMULATION] = _rows_of_a_step(config) // size
    for name, value in values.items():
        group, _, field = name.partition(".")
        held: Any = getattr(config, group)
        changed: Any = held | {field: value} if isinstance(held, dict) else replace(held, **{field: value})
        config = replace(config, **{group: changed})
    return config


def with_least_memory(config: Config) -> Config:
    """The same config with the last value for each `auto`: that takes least, and is what is checked first."""
    return with_values(config, {name: allowed(config, name)[-1] for name in autos_of(config)})


def ways_beside_stages(config: Config, *, on_host: bool) -> list[dict[str, Any]]:
    """Values of all that is `auto` but the stage, in the order in which they are tried. First a micro-batch becomes
    smaller, then units are computed again, then state leaves the device: to host memory, at last to a disk.

    Args:
        on_host: a rank computes in the host's memory: offloading to that frees nothing.
    """
    names = sorted((name for name in autos_of(config) if name != STAGE), key=_ORDER.index)
    values = {name: allowed(config, name) for name in names}
    for name in values.keys() & {*TIERS} if on_host else ():
        values[name] = ("device", "disk")
    ways = [dict(zip(names, way, strict=True)) for way in product(*values.values())]
    tiers = _VALUES[TIERS[0]]
    return sorted(ways, key=lambda way: max((tiers.index(way[name]) for name in names if name in TIERS), default=0))


def stages_in(config: Config) -> tuple[int, ...]:
    """The stages to choose from: all, or the one that is given."""
    return _VALUES[STAGE] if config.zero.stage == AUTO else (config.zero.stages[0],)


def asked_hash(config: Config) -> str:
    """16 hex digits of what a choice depends on but for the ranks: two configs share them that ask for the same."""
    values = noted(config)
    asked = {group: values[group] for group in _OF_A_PLAN} | {"callbacks": config.callbacks}
    asked |= {"train": {name: values["train"][name] for name in _OF_A_STEP}, "memory_gb": config.plan.memory_gb}
    return digest(asked)
