"""Read files of unknown authors: limits of size and depth, then types, come before their content.

    description = read_json(path, Described, max_nbytes=10**6)

A kind is any type of msgspec's: a dataclass, a TypedDict, `dict[str, float | None]`, `Annotated[int, Meta(le=3)]`
and the types below. Other keys than those of a kind are let through unread. True is no int; an int passes as float.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Annotated, Any

import yaml
from msgspec import Meta, ValidationError, convert

# A text as a terminal and a log can take it.


_NUM_PRINTED = 2000
_NUM_SHOWN_OF_END = 300


def printable(text: str, max_length: int = _NUM_PRINTED, *, keep: str = "\n\t") -> str:
    """Escape each unprintable character, and leave out the middle of a long text.

    An exception's text may hold a tensor, a file of 5 MB, colours, or halves of characters.

    Args:
        max_length: characters that are shown.
        keep: what stays though it cannot be printed.
    """
    if len(text) > max_length:
        num_left_out = len(text) - max_length
        start, end = text[: max_length - _NUM_SHOWN_OF_END], text[-_NUM_SHOWN_OF_END:]
        text = f"{start} [... {num_left_out} characters ...] {end}"
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def listed(names: Sequence[str], most: int = 3, *, conjunction: str = "and") -> str:
    """Names for a message: the first of them, and how many more there are."""
    rest = f" {conjunction} {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def duration(seconds: float) -> str:
    """A time to wait in one or two units, such as 40 s, 12 min or 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# Only regular files are opened, so that a FIFO, a device or a folder in their place stops nobody.


class NotRegularError(OSError):
    """Something else lies where a regular file must."""

    strerror: str

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        super().__init__(errno.EINVAL, f"it is {kind_of(mode)}, and must be a regular file", os.fspath(path))


def only_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """An opener, as in `open(path, "w", opener=only_regular)`: a FIFO without a reader would make that wait for ever.

    Raises:
        NotRegularError: it is no regular file.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise NotRegularError(path, stat.S_IFDIR) from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise NotRegularError(path, os.stat(path).st_mode) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(path, status.st_mode)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def only_new(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for a temporary file: what lies there, of a process that was killed or of nobody, goes first. A link
    goes, and not the file behind it.

    Raises:
        OSError: a folder lies there, or the file cannot be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def kind_of(mode: int) -> str:
    """The kind of a file, in words, by its `st_mode`."""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


MAX_DEPTH = 64
"""Lists and objects within each other. Ours have 12; Python's own reader gives up at about 1,000 with a traceback."""
MAX_INT = 2**63 - 1
MAX_NAME_NBYTES = 255
"""Linux' limit for the name of a file."""
MAX_DIGITS = 300
"""Digits of a whole number, where a kind is asked for. A float holds it, so that nothing ends in an OverflowError."""
Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list"}
_WORDS |= {"object": "a mapping"}
_KIND = re.compile(r"`([a-z |]+)`")
"""As msgspec names kinds: `int | null`."""
_NUM_SHOWN = 60
_MAX_PROBLEM = 300
_MAX_WORDS = 20
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


def read_json(path: str | os.PathLike[str], kind: Any, *, max_nbytes: int) -> Any:
    """The JSON in a regular file, as a value of a kind.

    Raises:
        OSError: it cannot be opened or read; `FileNotFoundError` where there is none.
        UntrustedFileError: it is not of this form, or larger than `max_nbytes`.
    """
    return parse_json(read_regular(path, max_nbytes=max_nbytes), kind)


def parse_json(text: str | bytes, kind: Any) -> Any:
    """The same of a text in memory.

    Raises:
        UntrustedFileError: it is no JSON, it is nested too deeply, a number is too long, or it is not of the kind.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        _require_shallow(text)
        # Not by msgspec: ours write NaN, and names that are no UTF-8 as halves of characters.
        content = json.loads(text, parse_int=int if kind is Any else lambda digits: _require_short(int(digits)))
    except UntrustedFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(f"it is no JSON: {error}") from None
    return require_kind(content, kind)


def require_kind(value: Any, kind: Any) -> Any:
    """A value of lists and dicts as one of a kind.

    Raises:
        UntrustedFileError: it is none; the text names the place, as in `files[3].nbytes`.
    """
    try:
        # The hook makes values of the classes below, of which msgspec knows nothing.
        return convert(value, kind, dec_hook=lambda cls, content: cls(content), str_keys=True)
    except (ValidationError, UnicodeEncodeError) as error:  # the second: a key with halves of characters
        raise UntrustedFileError(_sentence(str(error), value)) from None


def _sentence(error: str, value: Any) -> str:
    """An error of msgspec, such as "Expected `int` >= 0 - at `$.files[3].nbytes`", in our words and with the actual
    value."""
    problem, _, place = error.partition(" - at `")
    is_key = place.startswith("key`")
    place = place.removeprefix("key` in `").removesuffix("`").removeprefix("$").removeprefix(".")
    if problem.startswith("Expected "):
        expected, _, kind = problem.removeprefix("Expected ").partition(", got ")
        names, _, pattern = expected.partition(" matching regex ")
        words = pattern.removeprefix("'^(").removesuffix(r")\\Z'").replace("\\", "").split("|")
        words = words if len(words) <= _MAX_WORDS else [*words[:_MAX_WORDS], "..."]
        if pattern:
            expected = f"{'one of ' if len(words) > 1 else ''}{', '.join(words)}"
        else:
            expected = _KIND.sub(_in_words, names)
        actual = None if is_key else value_at(value, *re.findall(r"[^.\[\]]+|\.\.\.", place))
        got = shown(repr(actual)) if isinstance(actual, str | int | float) else _KIND.sub(_in_words, kind)
        problem = f"got {got}; it must be {expected}" if got else f"it must be {expected}"
    problem = re.sub("Object missing required field `(.*)`", r"\1 is missing", problem)
    text = problem[:1].lower() + problem[1:_MAX_PROBLEM]
    return f"{shown(place)}: {text}" if place else text


def _in_words(match: re.Match[str]) -> str:
    kinds = match[1].replace("int | float", "float").split(" | ")
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds)


def value_at(value: Any, *names: str) -> Any:
    """An inner value of dicts and lists within each other, as anybody may have written them; None where there is
    none."""
    for name in names:
        if isinstance(value, list | tuple):
            value = {str(number): item for number, item in enumerate(value)}
        value = value.get(name) if isinstance(value, dict) else None
    return value


def dotted(values: Mapping[Any, Any], prefix: str = "", *, with_empty: bool = False) -> dict[str, Any]:
    """Nested values by dotted names.

    Args:
        with_empty: whether a mapping without entries is a value.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_group = isinstance(value, Mapping) and (len(value) > 0 or not with_empty)
        path = f"{prefix}{name}"
        flat |= dotted(value, f"{path}.", with_empty=with_empty) if is_group else {path: value}
    return flat


def is_kind(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind."""
    try:
        require_kind(value, kind)
    except UntrustedFileError:
        return False
    return True


def one_of(*words: str) -> Meta:
    """For the annotation of a text: it is one of these."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, words))})\Z")


def shown(value: Any) -> str:
    """A value out of a file, short enough for a message and printable."""
    return printable(value if isinstance(value, str) else repr(value)[: 10 * _NUM_SHOWN], 2000, keep="")[:_NUM_SHOWN]


class Name(str):
    """A printable text."""

    def __new__(cls, value: Any) -> "Name":
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"got {shown(value)}; it must be a printable name")
        return super().__new__(cls, value)


class FileName(str):
    """The plain name of a file in this very folder, as `../x`, `a/b`, `/x` and `` are none."""

    def __new__(cls, value: Any) -> "FileName":
        if not _is_file_name(value):
            raise ValueError(f"got {shown(value)}; it must be the name of a file in this folder")
        return super().__new__(cls, value)


class FilePath(str):
    """The name of a file in this folder, or in one within it, such as `templates/chat.jinja`."""

    def __new__(cls, value: Any) -> "FilePath":
        if not all(map(_is_file_name, value.split("/") if isinstance(value, str) else [value])):
            raise ValueError(f"got {shown(value)}; it must be the name of a file in this folder or below")
        return super().__new__(cls, value)


def _is_file_name(value: Any) -> bool:
    if not isinstance(value, str) or not value.isprintable() or value in (".", ".."):
        return False
    return 0 < len(value.encode()) <= MAX_NAME_NBYTES and "/" not in value and "\\" not in value


class Shape(tuple[int, ...]):
    """The lengths of a tensor, of which torch can have one: it multiplies those beside a 0 too."""

    def __new__(cls, value: Any) -> "Shape":
        are_lengths = isinstance(value, list | tuple) and all(type(length) is int and length >= 0 for length in value)
        if not are_lengths or len(value) > MAX_DEPTH or prod(max(1, length) for length in value) > MAX_INT:
            raise ValueError(f"got {shown(value)}; it must be a list of lengths")
        return super().__new__(cls, value)


def _require_short(number: int) -> int:
    """A whole number of a file, if a float holds it."""
    if abs(number) >= 10**MAX_DIGITS:
        raise UntrustedFileError(f"it has a whole number of more than {MAX_DIGITS} digits")
    return number


def _require_shallow(text: str) -> None:
    depth = 0
    for token in _TOKENS.finditer(text):
        bracket = token[0][0]
        depth += (bracket in "[{") - (bracket in "]}")
        if depth > MAX_DEPTH:
            raise UntrustedFileError(f"its lists and objects are nested more than {MAX_DEPTH} deep")


# YAML of unknown authors: texts, numbers, true, false and null in lists and mappings.
#
# Anchors and aliases are refused: nine lines of them can stand for a billion values. So are tags: some build objects.


_KINDS = ("str", "int", "float", "bool", "null", "seq", "map")


class _PlainLoader(yaml.SafeLoader):
    """Refuses all else. A date is a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the class has it
        character: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in _KINDS]
        for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise UntrustedFileError(f"line {event.start_mark.line + 1} has an anchor (&) or an alias (*)")
        if getattr(event, "tag", None) is not None:
            raise UntrustedFileError(f"line {event.start_mark.line + 1} has a tag (!)")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UntrustedFileError(f"its lists and mappings are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if isinstance(key, list | dict):
                raise UntrustedFileError("a key is a list or a mapping")
            if key in keys[:number]:
                raise UntrustedFileError(f"{key} is there twice")
        return super().construct_mapping(node, deep=deep)


_PlainLoader.add_constructor(
    "tag:yaml.org,2002:int",  # such as 0xff or 1:59:59
    lambda loader, node: _require_short(loader.construct_yaml_int(node)),
)


def parse_yaml(content: bytes) -> Any:
    """The content of a YAML file; None if it is empty.

    Raises:
        UntrustedFileError: it is no such YAML.
    """
    try:
        return yaml.load(content.decode(), _PlainLoader)
    except UntrustedFileError:
        raise
    except Exception as error:  # whatever pyyaml raises: ValueError of `0b_`, IndexError, RecursionError
        raise UntrustedFileError(" ".join(str(error).split()) or type(error).__name__) from None
