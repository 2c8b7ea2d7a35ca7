"""Checks arguments of a class against its annotations, before the class fails on them."""

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from zerotrain.config.words import word

_LISTS = (list, tuple, set, frozenset)
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


def kind_problems(
    target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], arguments: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """(name, what the target takes instead) of each argument of another kind than its annotation or default says.

    Only what is certain is told: an argument of a class of its own, or one that nothing is said of, takes anything.
    """
    hints = _annotations(target)
    for name, value in arguments.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = parameter.default
        annotation = hints.get(name, _of_default(default))
        # A default of None is often left out of the annotation.
        if not _fits(value, annotation) and (value is not None or default is not None):
            shown = list(default) if isinstance(default, tuple) else default
            otherwise = "" if default is parameter.empty else f"; its default is {word(shown)}"
            yield name, f"{_describe(annotation)}{otherwise}"


def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except Exception:  # names that exist for a type checker alone, and whatever else is written there
        return {}


def _of_default(default: Any) -> Any:
    """The kind of an argument without annotation, by its default: any number if that is a number."""
    if isinstance(default, bool):
        return bool
    return float if isinstance(default, int | float) else Any


def _fits(value: Any, annotation: Any) -> bool:
    return any(_fits_one(value, member) for member in _members(annotation))


def _fits_one(value: Any, member: Any) -> bool:
    kind = typing.get_origin(member) or member
    if isinstance(value, dict) and "_target_" in value:  # an object of any class
        return True
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value % 1 == 0))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is str:
        return not isinstance(value, list | dict)
    if kind in _LISTS:
        return isinstance(value, list) and _fit_each(value, typing.get_args(member))
    # No yaml holds a tensor; anything else may be made of what it holds.
    return getattr(kind, "__name__", "") != "Tensor"


def _fit_each(values: list[Any], kinds: tuple[Any, ...]) -> bool:
    if not kinds or Ellipsis in kinds or len(kinds) == 1:
        return all(_fits(value, kinds[0]) for value in values) if kinds else True
    return len(values) == len(kinds) and all(_fits(value, kind) for value, kind in zip(values, kinds, strict=True))


def _members(annotation: Any) -> Collection[Any]:
    if annotation is None:
        return (type(None),)
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _describe(annotation: Any) -> str:
    said = [_describe_one(member) for member in _members(annotation)]
    return " or ".join(dict.fromkeys(each for each in said if each))


def _describe_one(member: Any) -> str:
    kind = typing.get_origin(member) or member
    if kind not in _LISTS:
        return _KINDS.get(kind, "")
    kinds = typing.get_args(member)
    if not kinds or not _describe(kinds[0]):
        return "a list"
    of = _describe(kinds[0]).removeprefix("a ")
    return (
        f"a list of {len(kinds)}, each a {of}" if len(kinds) > 1 and Ellipsis not in kinds else f"a list, each a {of}"
    )
