"""Read files that somebody else may have written: a schema and limits of size and depth come before their content.

    said = read_json(path, {"step": Natural(), "files": [{"name": FileName(), "nbytes": Natural()}]}, max_nbytes=10**6)

A schema is one of
    a type, or several in a tuple: the value has exactly one of them (True is no int; int passes as float);
    None, within a tuple: null;
    a dict: these keys, each with its own schema; `Optional(schema)` may be missing; other keys are let through unread;
    a list of one schema: a list of values that have it;
    an object with `problem(value)`, such as `Natural`, `OneOf`, `FileName`, `Each`: None, or what the value must be;
    object: anything.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

from zerotrain.files.printable import printable
from zerotrain.files.regular import NotRegularError, only_regular

MAX_DEPTH = 64
"""Lists and objects within each other. Ours have 12; Python's own reader gives up at about 1,000 with a traceback."""
MAX_INT = 2**63 - 1
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_NUM_SHOWN = 60
_PART_NBYTES = 2**20


class UntrustedFileError(ValueError):
    """A file is not what it must be. The text is printable and does not name the file: who reads it knows its name."""

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem, keep=""))


def read_regular(path: str | os.PathLike[str], *, max_nbytes: int) -> bytes:
    """The contents of a regular file. A FIFO, a device or a socket is refused, and none of them can make this wait.

    Raises:
        OSError: it cannot be opened or read; `FileNotFoundError` where there is none.
        UntrustedFileError: it is no regular file, or it is larger than `max_nbytes`.
    """
    try:
        file = open(path, "rb", opener=only_regular)  # noqa: SIM115 - closed below
    except NotRegularError as error:
        raise UntrustedFileError(error.strerror) from None
    with file:
        content, is_larger = bytearray(), os.fstat(file.fileno()).st_size > max_nbytes
        # In parts: Python makes room for all that is asked for, and a file may say little and be long, as in /proc.
        while not is_larger and (part := file.read(min(_PART_NBYTES, max_nbytes + 1 - len(content)))):
            content += part
            is_larger = len(content) > max_nbytes
        if is_larger:
            raise UntrustedFileError(f"it has more than the {max_nbytes:,} bytes that are allowed here")
        return bytes(content)


def read_json(path: str | os.PathLike[str], schema: Any, *, max_nbytes: int) -> Any:
    """The JSON in a regular file, which has the schema.

    Raises:
        OSError: it cannot be opened or read; `FileNotFoundError` where there is none.
        UntrustedFileError: it is not of this form, or larger than `max_nbytes`.
    """
    return parse_json(read_regular(path, max_nbytes=max_nbytes), schema)


def parse_json(text: str | bytes, schema: Any) -> Any:
    """The same of a text that was read already.

    Raises:
        UntrustedFileError: it is no JSON, it is nested too deeply, or it does not have the schema.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        _require_shallow(text)
        content = json.loads(text)
    except UntrustedFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(f"it is no JSON: {error}") from None
    require_schema(content, schema)
    return content


def require_schema(value: Any, schema: Any) -> None:
    """Make sure that a value has a schema.

    Raises:
        UntrustedFileError: it has not; the text names the place, as in `files.3.nbytes`.
    """
    for place, must, found in _misfits(value, schema, ()):
        raise UntrustedFileError(f"{'.'.join(place) or 'it'} is {shown(found)}, and must be {must}")


def has_schema(value: Any, schema: Any) -> bool:
    """Whether a value has a schema."""
    return not any(_misfits(value, schema, ()))


def shown(value: Any) -> str:
    """A value out of a file, short enough for a message and printable."""
    return printable(value if isinstance(value, str) else repr(value)[: 10 * _NUM_SHOWN], 2000, keep="")[:_NUM_SHOWN]


@runtime_checkable
class Schema(Protocol):
    """A check of one value."""

    def problem(self, value: Any) -> str | None:
        """None, or what the value must be."""


@dataclass(frozen=True)
class Optional:
    """A key that may be missing."""

    schema: Any


@dataclass(frozen=True)
class Each:
    """An object of any keys, whose values have one schema."""

    schema: Any


@dataclass(frozen=True)
class Check:
    """A value that a function says yes to."""

    holds: Callable[[Any], bool]
    must: str
    """Words for a valid value, in messages."""

    def problem(self, value: Any) -> str | None:
        return None if self.holds(value) else self.must


@dataclass(frozen=True)
class Natural:
    """A whole number from 0 to `most`, which never exceeds 2**63 - 1."""

    most: int = MAX_INT

    def problem(self, value: Any) -> str | None:
        return None if type(value) is int and 0 <= value <= self.most else f"a whole number from 0 to {self.most}"


@dataclass(frozen=True)
class Shape:
    """The lengths of a tensor, of which torch can have one: it multiplies those beside a 0 too."""

    def problem(self, value: Any) -> str | None:
        are_lengths = type(value) is list and all(type(each) is int and 0 <= each <= MAX_INT for each in value)
        if are_lengths and len(value) <= MAX_DEPTH and prod(max(1, each) for each in value) <= MAX_INT:
            return None
        return "a list of lengths"


@dataclass(frozen=True)
class OneOf:
    """One of some values."""

    allowed: Collection[Any]

    def problem(self, value: Any) -> str | None:
        if any(type(value) is type(each) and value == each for each in self.allowed):
            return None
        return f"one of {', '.join(map(str, self.allowed))}"


@dataclass(frozen=True)
class FileName:
    """The plain name of a file in this very folder, as `../x`, `a/b`, `/x` and `` are none."""

    def problem(self, value: Any) -> str | None:
        is_plain = (
            isinstance(value, str) and value not in ("", ".", "..") and not any(each in value for each in "/\\\0")
        )
        return None if is_plain and value.isprintable() else "the name of a file in this folder"


@dataclass(frozen=True)
class FilePath:
    """The name of a file in this folder, or in one within it, such as `templates/chat.jinja`."""

    def problem(self, value: Any) -> str | None:
        parts = value.split("/") if isinstance(value, str) else [value]
        is_within = all(FileName().problem(part) is None for part in parts)
        return None if is_within else "the name of a file in this folder or below"


def _misfits(value: Any, schema: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield place, "an object", value
            return
        for name, each in schema.items():
            if name in value:
                inner = each.schema if isinstance(each, Optional) else each
                yield from _misfits(value[name], inner, (*place, name))
            elif not isinstance(each, Optional):
                yield (*place, name), "there", "missing"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield place, "a list", value
            return
        for number, item in enumerate(value):
            yield from _misfits(item, schema[0], (*place, str(number)))
    elif isinstance(schema, Each):
        if not isinstance(value, dict):
            yield place, "an object", value
            return
        for name, item in value.items():
            yield from _misfits(item, schema.schema, (*place, shown(name)))
    elif isinstance(schema, type | tuple):
        if (problem := _type_problem(value, schema if isinstance(schema, tuple) else (schema,))) is not None:
            yield place, problem, value
    elif isinstance(schema, Schema):
        if (problem := schema.problem(value)) is not None:
            yield place, problem, value
    else:
        raise TypeError(f"{schema!r} is no schema")


_WORDS: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", None: "null"}
_WORDS |= {dict: "an object", list: "a list"}


def _type_problem(value: Any, allowed: tuple[Any, ...]) -> str | None:
    if object in allowed or (value is None and None in allowed) or type(value) in allowed:
        return None
    if float in allowed and type(value) is int:
        return None
    return " or ".join(_WORDS[each] for each in allowed)


def _require_shallow(text: str) -> None:
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token[0][0]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_DEPTH:
            raise UntrustedFileError(f"its lists and objects are nested more than {MAX_DEPTH} deep")
