"""Damage, by seed: the same number gives the same damage of the same bytes."""

import json
import random
from collections.abc import Callable
from typing import Any

import yaml

DEEP = "a list 5,000 deep, which json.dumps itself cannot write"
LIST = "[" * 5000 + "]" * 5000
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, 10**5000, -(10**30), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", "a\nb",
    "\x1b[2J\x1b[31mred", "\u202egnp", "\ud800", "x" * 5000, "float32", "float64", "int4", "load", "F32", "I4", "-1",
    "0_1", "9" * 5000, [], {}, [[]], [None], [-1, 2], [10**30, 0], {"value": 1}, {"dtype": "load", "value": 1},
    {"dtype": "float32", "value": [[1], [2, 3]]}, {"object": "f"}, [0] * 3000, DEEP,
)  # fmt: skip
"""In place of a value."""


BYTES = (b"\0", b"\xff", b"9", b"-", b"[", b'"')
NUMBERS = (b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7)


def _flipped(byte: bytes, bit: int) -> bytes:
    return bytes([(byte or b"\0")[0] ^ 1 << bit])


def damaged_bytes(original: bytes, seed: int, others: tuple[bytes, ...] = (), hot: int = 0) -> bytes:
    """Flipped, cut, longer, moved, or another file's.

    Args:
        others: what a file may be swapped with.
        hot: in every second one the damage lies in so many bytes at the begin: a header.
    """
    chance = random.Random(seed)
    content = bytearray(original)
    end = min(len(content), hot) if hot and chance.random() < 0.5 else len(content)
    at = chance.randrange(max(1, end))
    length = chance.choice((1, 2, 4, 8, 64, 500))
    kinds: dict[str, Callable[[], Any]] = {
        "bit": lambda: content.__setitem__(slice(at, at + 1), _flipped(content[at : at + 1], seed % 8)),
        "byte": lambda: content.__setitem__(slice(at, at + 1), chance.choice(BYTES)),
        "number": lambda: content.__setitem__(slice(at, at + 8), chance.choice(NUMBERS)),
        "cut": lambda: content.__delitem__(slice(at, None)),
        "out": lambda: content.__delitem__(slice(at, at + length)),
        "in": lambda: content.__setitem__(slice(at, at), chance.randbytes(length)),
        "again": lambda: content.__setitem__(slice(at, at), content[at : at + length]),
        "zeros": lambda: content.__setitem__(slice(at, at + length), bytes(len(content[at : at + length]))),
        "longer": lambda: content.extend(chance.choice((b"\0", b"\n", b"}", chance.randbytes(length)))),
        "empty": lambda: content.clear(),
        "other": lambda: content.__setitem__(slice(None), chance.choice(others or (b"[" * 9999,))),
    }  # fmt: skip
    names = [*["bit", "byte", "number", "cut", "out", "in", "again", "zeros"] * 3, "longer", "empty", "other"]
    for _ in range(chance.choice((1, 1, 1, 2))):
        kinds[chance.choice(names)]()
    return bytes(content)


def damaged_json(original: bytes, seed: int) -> Any:
    """The content of a JSON file with one value, key or place wrong; `text_of` writes it."""
    chance = random.Random(seed)
    content = json.loads(original)
    for _ in range(chance.choice((1, 1, 1, 2))):
        places = list(_places(content))
        if not places:
            return chance.choice(NASTY)
        holder, key = chance.choice(places)
        other, other_key = chance.choice(places)
        value = holder[key]
        kind = chance.choice(("nasty", "nasty", "nasty", "out", "swapped", "renamed", "near", "twice"))
        if kind == "out":
            del holder[key]
        elif kind == "swapped":
            holder[key], other[other_key] = json.loads(json.dumps([other[other_key], value]))
        elif kind == "renamed" and isinstance(holder, dict):
            holder[chance.choice(["", "../x", "\x1b[2J", "a\nb", "x" * 300, key + "_", "__class__"])] = holder.pop(key)
        elif kind == "near":
            holder[key] = _near(value, chance)
        elif kind == "twice" and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(value)))
        else:
            holder[key] = chance.choice(NASTY)
    return content


def text_of(content: Any) -> bytes:
    """As JSON."""
    text = "9" * 5000 if content == 10**5000 else _dumped(content)
    return text.replace(json.dumps(DEEP), LIST).encode()


def _dumped(content: Any) -> str:
    """Numbers of 5,000 digits, which Python writes to nobody, too."""
    marked = json.dumps(_without_giants(content))
    return marked.replace('"a giant"', "1" + "0" * 5000)


def _without_giants(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_giants(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_giants(each) for each in value]
    return "a giant" if type(value) is int and abs(value) > 10**100 else value


def _places(content: Any) -> Any:
    """(what holds it, its key or number) of each value."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield content, key
            yield from _places(value)


def _near(value: Any, chance: random.Random) -> Any:
    """Nearly right: of the same type, or of the one next to it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value - 1, value * 2, float(value), str(value), bool(value)))
    if isinstance(value, float):
        return chance.choice((-value, value * 2, str(value), int(value) if value == value and abs(value) < 1e9 else 0))
    if isinstance(value, str):
        return chance.choice((value + " ", value[:-1], value.upper(), [value], "../" + value, value * 2))
    if isinstance(value, list):
        return chance.choice(
            (value[::-1], value[:-1], value + value, {}, {str(n): each for n, each in enumerate(value)})
        )
    return list(value.items()) if isinstance(value, dict) else 0


SPECIAL = {
    "a giant": "1" + "0" * 399,
    "less than a giant": "-1" + "0" * 399,
    "infinity": "1e400",
    "no number": "NaN",
    "deep": "[" * 60 + "]" * 60,
    "too deep": LIST,
}
"""Values that `json.dumps` cannot write, by what stands for them there."""
KINDS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 255, 256, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**299, 0.5, -0.5, 1e300, "", "x",
    "0", "null", "SIGTERM", "SIG_NONE", "__class__", "\0", "\ud800", "\x1b[2J", "9" * 400, "x" * 10**6, [], [1],
    ["x"], [None], [[]], {}, {"a": 1}, {"": None}, [0] * 10**5, {str(n): n for n in range(10**4)}, *SPECIAL, *SPECIAL,
)  # fmt: skip
LINE_NBYTES = 64 * 2**20


def damaged_kind(original: bytes, seed: int, form: str) -> bytes:
    """The file with a value of another kind or size, a key of another name, or bytes that are none of its form.

    Args:
        form: json, lines (of JSON each), yaml, or "" of what holds no values.
    """
    chance = random.Random(seed)
    what = chance.choice(
        ["value"] * 12 + ["key"] * 3 + ["cut", "nul", "no text", "mark", "twice"] + ["line"] * (seed % 20 == 0)
    )
    if what in ("value", "key") and form:
        return _with_another(original, chance, form, what)
    at = chance.randrange(len(original) + 1)
    pieces = {"nul": b"\0" * 9, "no text": b"\xff\xfe\xc3", "mark": b"\xef\xbb\xbf", "line": b"x" * LINE_NBYTES}
    if what == "cut":
        return original[:at]
    if what == "twice":
        return original + original
    piece = pieces.get(what) or chance.choice([*pieces.values()][:3])
    return piece + original if what == "mark" else original[:at] + piece + original[at:]


def _with_another(original: bytes, chance: random.Random, form: str, what: str) -> bytes:
    lines = original.splitlines() if form == "lines" else [original]
    number = chance.randrange(len(lines))
    content = yaml.safe_load(lines[number]) if form == "yaml" else json.loads(lines[number])
    places = list(_places(content))
    holder, key = chance.choice(places)
    if what == "value" or not isinstance(holder, dict):
        holder[key] = chance.choice(KINDS)
    else:
        holder[chance.choice(("", "0", "status", "=x", "__class__", "\x1b[2J", "\ud800", "x" * 10**5))] = holder.pop(
            key
        )
    if chance.random() < 0.02:
        content = chance.choice(KINDS)
    if form == "yaml" and isinstance(content, dict):
        text = "\n".join(f"{json.dumps(name)}: {_special(value)}" for name, value in content.items())
    else:
        text = _special(content)
    lines[number] = text.encode()
    return b"\n".join(lines) + b"\n" * (form == "lines")


def _special(content: Any) -> str:
    text = json.dumps(content)
    for name, value in SPECIAL.items():
        text = text.replace(json.dumps(name), value)
    return text
