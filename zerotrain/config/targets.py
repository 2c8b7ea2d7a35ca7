"""Classes and functions named by `_target_`: that they exist and take the arguments given."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from zerotrain.config.kinds import kind_problems
from zerotrain.config.suggest import did_you_mean
from zerotrain.config.words import word

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})
"""Keys that Hydra's instantiate reads itself; every other key is an argument of the target."""


def target_problems(values: dict[str, Any], *, name: str) -> Iterator[str]:
    """One line for each thing that would stop Hydra's instantiate from calling the target of `values`.

    Args:
        values: an open group, `{"_target_": "package.Class", argument: value, ...}`.
        name: its name in the config, for the messages.
    """
    if not isinstance(values.get("_target_"), str):
        yield f"{name}._target_: got {word(values.get('_target_'))}; it must be the import path of a class or function"
        return
    path = values["_target_"]
    try:
        target = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
        yield f"{name}._target_: got {path}; {_why_not_found(path, error)}"
        return
    if not callable(target):
        yield f"{name}._target_: got {path}, a {type(target).__name__}; it must be a class or function"
        return
    yield from _argument_problems(target, values, name)
    for nested_name, nested in _nested(values, name):
        yield from target_problems(nested, name=nested_name)


def without_arguments(group: str) -> str:
    """How to remove an argument that is null: Hydra's ~ removes only one that has a value."""
    others = f"{group}=own, which starts without arguments, or " if group == "data" else ""
    return f"give {others}a {group} yaml without it"


def makes_callables(path: Any) -> bool:
    """Whether `path` names a class whose objects can be called: they take what comes later, without `_partial_`."""
    try:
        target = pkgutil.resolve_name(path)
    except (Exception, SystemExit):  # `target_problems` says why
        return False
    return isinstance(target, type) and any("__call__" in vars(base) for base in target.__mro__)


def makes(path: Any, kind: type) -> bool:
    """Whether `path` names a class of a kind, or none that there is, which `target_problems` tells."""
    try:
        target = pkgutil.resolve_name(path)
    except (Exception, SystemExit):
        return True
    return isinstance(target, type) and issubclass(target, kind)


def takes(path: Any, argument: str) -> bool:
    """Whether `path` names a class or function with an argument of this name."""
    try:
        return argument in inspect.signature(pkgutil.resolve_name(path)).parameters
    except (Exception, SystemExit):  # `target_problems` says why
        return False


def _argument_problems(target: Callable[..., Any], values: dict[str, Any], name: str) -> Iterator[str]:
    try:
        signature = inspect.signature(target)
    except ValueError:  # some classes written in C have none to show
        return
    path, parameters = values["_target_"], signature.parameters
    arguments = {key: value for key, value in values.items() if key not in HYDRA_KEYS}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_any else [key for key in arguments if key not in parameters]
    for key in unknown:
        # Hydra leaves out only what has a value.
        otherwise = f"leave it out with ~{name}.{key}" if arguments[key] is not None else without_arguments(name)
        hint = did_you_mean(key, parameters) or f"; {otherwise}"
        yield f"{name}.{key}: {path} takes no such argument{hint}"
    known = {key: value for key, value in arguments.items() if key not in unknown}
    bind = signature.bind_partial if values.get("_partial_") else signature.bind
    for key, takes in kind_problems(target, parameters, known):
        yield f"{name}.{key}: got {word(known[key])}; {path} takes {takes}"
    try:
        bind(*values.get("_args_", ()), **known)
    except TypeError as error:
        yield f"{name}: {path}: {error}"


def _why_not_found(path: str, error: BaseException) -> str:
    """The reason why an import path cannot be imported, in one line."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        return "it must have the form module.Class"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        return f"there is no module {missing.name}; it is looked for where you are, beside launch.py and in PYTHONPATH"
    except (Exception, SystemExit) as failed:
        return f"importing {module_name} failed: {type(failed).__name__}: {failed}".split("\n")[0]
    if hasattr(module, attribute):
        return str(error).split("\n")[0]
    return f"{module_name} has no {attribute}{did_you_mean(attribute, dir(module))}"


def _nested(value: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outermost targets among the arguments."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, dict) and "_target_" in item:
            yield f"{name}.{key}", item
        else:
            yield from _nested(item, f"{name}.{key}")
