"""Settings that may be `auto`: which values there are to choose from, and a config with those that were chosen."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from zerotrain.config.compose import digest, noted
from zerotrain.config.schema import Config
from zerotrain.settings import AUTO

STAGE = "zero.stage"
VALUES: Mapping[str, tuple[Any, ...]] = {STAGE: (0, 1, 2, 3)}
"""By setting, what a run may get for `auto`: those that take less time first, but for stages, whose plans tell it."""
_OF_A_PLAN = ("zero", "precision", "offload", "model", "data", "optimizer")
_OF_A_STEP = ("micro_batch_size", "gradient_accumulation_steps", "virtual_ranks")


def autos_in(config: Config) -> list[str]:
    """The settings that are `auto`, and are to be chosen."""
    return [name for name, value in values_in(config, VALUES).items() if value == AUTO]


def unchosen_problems(config: Config) -> list[str]:
    """A line for each `auto` where there is no run that it could be chosen for."""
    return [f"{name}: got auto, which is chosen as a run starts; it must be a value here" for name in autos_in(config)]


def values_in(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """The values that a config has of some of the `VALUES`."""
    values = {}
    for name in names:
        group, _, field = name.partition(".")
        held: Any = getattr(config, group)
        values[name] = held.get(field) if isinstance(held, dict) else getattr(held, field)
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The same config with other values of some of the `VALUES`; `config` stays as it is."""
    for name, value in values.items():
        group, _, field = name.partition(".")
        held: Any = getattr(config, group)
        changed: Any = held | {field: value} if isinstance(held, dict) else replace(held, **{field: value})
        config = replace(config, **{group: changed})
    return config


def with_least_memory(config: Config) -> Config:
    """The same config with the last value for each `auto`: that takes least, and is what is checked first."""
    return with_values(config, {name: VALUES[name][-1] for name in autos_in(config)})


def ways_beside_stages(config: Config) -> Iterator[dict[str, Any]]:
    """The values of all that is `auto` but the stage, by setting; the fastest first."""
    names = [name for name in reversed([*VALUES]) if name in autos_in(config) and name != STAGE]
    for values in product(*(VALUES[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def stages_in(config: Config) -> tuple[int, ...]:
    """The stages to choose from: all, or the one that is given."""
    return VALUES[STAGE] if config.zero.stage == AUTO else (config.zero.stages[0],)


def asked_hash(config: Config) -> str:
    """16 hex digits of what a choice depends on but for the ranks: two configs share them that ask for the same."""
    values = noted(config)
    asked = {group: values[group] for group in _OF_A_PLAN} | {"callbacks": config.callbacks}
    asked |= {"train": {name: values["train"][name] for name in _OF_A_STEP}, "memory_gb": config.plan.memory_gb}
    return digest(asked)
