"""The classes and functions that a config out of a file may name. The author of the file chooses them: a checkpoint's
manifest, and the json of an export, name the classes of a run. Those known here only compute and read. All others need
the user's permission.
"""

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

import zerotrain.data
import zerotrain.models
import zerotrain.training.metrics
from zerotrain.config.schema import Config
from zerotrain.config.words import find_references, walk_values
from zerotrain.engine import MuonWithAdamW
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable

TARGET = "_target_"
_MAX_SHOWN = 300
_PACKAGES = ("zerotrain", "torch")
"""A name may lead through modules of these alone: others lie in them too, such as `zerotrain.inspect.os`."""


def require_trusted(
    config: Config, groups: Collection[str], path: Path, *, overrides: Mapping[str, Any] | None = None
) -> None:
    """Check the classes of a config from a file: none may run code of the file's author.

    Nothing is imported for it.

    Args:
        groups: the groups of the config that are built, such as model.
        path: the folder that the config is from.
        overrides: the settings that the user has named, in the form of the config. Classes named there are trusted.

    Raises:
        ConfigError: a class that is not known, or a text that Hydra would resolve.
    """
    for group in groups:
        values = getattr(config, group)
        own = list(_targets((overrides or {}).get(group), group))
        foreign = [
            f"{name}={printable(str(target), _MAX_SHOWN, keep='')}"
            for name, target in _targets(values, group)
            if not _is_known(target) and (name, target) not in own
        ]
        if foreign:
            raise ConfigError(
                f"{path} names {', '.join(foreign)}; a file may only name models and data of zerotrain, layers of "
                "torch.nn and optimizers of torch.optim, because other classes can run any code; give --trust-code if "
                "you trust the author of the file"
            )
        for name, text in find_references(values, group):
            raise ConfigError(f"{path}: {name} is {text}, and a reference in a file is never resolved")


def names_others(config: Config, groups: Collection[str]) -> bool:
    """Whether a config names an unknown class, and so runs code of a user's."""
    return not all(are_known(getattr(config, group)) for group in groups)


def are_known(values: Any) -> bool:
    """Whether all classes named in values, at any depth, are known."""
    return all(_is_known(target) for _, target in _targets(values, ""))


def _targets(values: Any, group: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each `_target_`, at any depth."""
    for name, value in walk_values(values, group):
        if isinstance(value, dict) and TARGET in value:
            yield f"{name}.{TARGET}", value[TARGET]


def _is_known(target: Any) -> bool:
    value = _find_imported(target) if isinstance(target, str) else None
    return isinstance(value, type | FunctionType) and value in _safe_objects()


def _find_imported(target: str) -> Any:
    """The object of a dotted name among modules imported already; None if it leads anywhere else."""
    package, *parts = target.split(".")
    value: Any = sys.modules.get(package) if package in _PACKAGES else None
    for part in parts:
        if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] not in _PACKAGES:
            return None
        inside = sys.modules.get(f"{value.__name__}.{part}")
        # Our own package takes its names from its modules at their first use.
        value = getattr(value, part, inside) if value is zerotrain else vars(value).get(part, inside)
    return value


@cache
def _safe_objects() -> frozenset[Any]:
    """Read at the first use, when torch.nn is whole."""
    kinds = ((torch.nn, torch.nn.Module, "torch.nn.modules."), (torch.optim, torch.optim.Optimizer, "torch."))
    of_torch = [
        member
        for package, kind, home in kinds
        for member in vars(package).values()
        if isinstance(member, type) and issubclass(member, kind) and member.__module__.startswith(home)
    ]
    packages = (zerotrain.models, zerotrain.data, zerotrain.training.metrics)
    ours = [vars(package).get(name) for package in packages for name in package.__all__]
    schedules = (vars(zerotrain.training)[name] for name in zerotrain.training.__all__)
    return frozenset([*of_torch, *filter(inspect.isclass, ours), MuonWithAdamW, *filter(inspect.isfunction, schedules)])
