"""Values out of files of others, as numbers and as texts for people."""

import re
from collections.abc import Iterable
from typing import Any

from zerotrain.files.untrusted import printable
from zerotrain.training.report import in_unit

MAX_NUMBER = 1e18
MAX_CELL = 60
"""Characters to show of a setting's value, or of its name in short."""
_LONG_NUMBER = re.compile(r"(?<=[=\[,:])-?(?=[\d.e+-]{8})\d+\.\d+(e[+-]?\d+)?(?=[\],}]|$)")


def number(value: Any) -> float | None:
    """A value if it is a number to reckon with; None if it is nan, infinite, a text or of a size that nothing has."""
    is_one = type(value) in (int, float) and abs(value) < MAX_NUMBER
    return value if is_one else None


def cell(value: Any) -> str:
    """The value of a setting, short and printable: true, 0.003, [0.9, 0.95], GPT for a class."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < MAX_NUMBER else repr(value)
    text = value if isinstance(value, str) else str(value)[: 4 * MAX_CELL]
    return shortened(text, MAX_CELL)


def with_short_numbers(override: str) -> str:
    """An override for people: of a longer number four digits, as of the values that a sampler has chosen."""
    return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", override)


def value_text(name: str, value: Any) -> str:
    """The value of a setting, in short: of a class its name alone."""
    text = cell(value)
    return text.rpartition(".")[2] or text if name.endswith("_target_") else text


def is_number(value: Any) -> bool:
    """Whether a setting's value is a number, and not true or false."""
    return type(value) in (int, float)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each dotted name with its last part, or as many as tell it from the others; a class is called by its group."""
    names = list(names)
    plain = {name: name.removesuffix("._target_").split(".") for name in names}
    short = {}
    for name, parts in plain.items():
        other_parts = [other for other_name, other in plain.items() if other_name != name]
        num = next(
            (num for num in range(1, len(parts)) if all(o[-num:] != parts[-num:] for o in other_parts)), len(parts)
        )
        short[name] = shortened(".".join(parts[-num:]), MAX_CELL)
    return short


def shortened(text: str, most: int) -> str:
    """A printable text in one line of so many characters."""
    text = printable(text[: 2 * most], 4 * most, keep="")
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def first_line(text: str | None, most: int = 500) -> str | None:
    """The first line of an error with words in it; None for none."""
    lines = (line.strip() for line in (text or "")[: 20 * most].splitlines())
    line = next(filter(None, lines), None)
    return None if line is None else shortened(line, most)


def in_bytes(nbytes: float | None) -> str:
    """Such as 10.2 MB; a dash for what is not known."""
    return "\N{EN DASH}" if nbytes is None else in_unit(nbytes)


def in_order(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names as people do: 2 before 10."""
    parts = re.split(r"([0-9]{1,18})", name, flags=re.ASCII)
    return [(0, int(part), "") if place % 2 else (1, 0, part) for place, part in enumerate(parts) if part]
