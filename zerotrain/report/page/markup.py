"""Pieces of html, escaped by construction: a text that is no `Markup` yet is escaped and made printable."""

from collections.abc import Iterable, Sequence
from html import escape

from zerotrain.files.untrusted import printable
from zerotrain.report.values import shortened

MAX_TEXT = 2000
NUM_NAMED = 12
"""Jobs of a list that are named one by one."""
MARKS = {"completed": "\N{CHECK MARK}", "diverged": "\N{NORTH EAST ARROW}", "failed": "\N{MULTIPLICATION SIGN}"}
SHORT_HASH = 8
_VOID = ("input", "meta", "br", "hr")


class Markup(str):
    """Text that is html already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element. An attribute `class_` is `class`, `data_x` is `data-x`; None and False leave it out."""
    parts = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {key}")
        elif value is not None and value is not False:
            parts.append(f' {key}="{text(value if isinstance(value, str) else f"{value:g}")}"')
    opened = f"<{name}{''.join(parts)}>"
    return Markup(opened if name in _VOID else f"{opened}{joined(children)}</{name}>")


def text(value: str) -> Markup:
    """A text as it is to be read."""
    return value if isinstance(value, Markup) else Markup(escape(printable(value, MAX_TEXT, keep="")))


def joined(children: Iterable[str]) -> Markup:
    """Pieces one after the other."""
    return Markup("".join(map(text, children)))


def hidden(words: str) -> Markup:
    """Words for those who hear the page."""
    return tag("span", words, class_="vh")


def names_of(jobs: Sequence[str]) -> str:
    """Jobs in few words: 0-3, 7; of many the first ones and how many more."""
    if all(job.isascii() and job.isdigit() and len(job) < 10 for job in jobs):
        runs: list[list[int]] = []
        for each in sorted(map(int, jobs)):
            if runs and each == runs[-1][-1] + 1:
                runs[-1].append(each)
            else:
                runs.append([each])
        pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}\N{EN DASH}{run[-1]}" for run in runs]
    else:
        pieces = [shortened(job, 40) for job in jobs]
    more = len(pieces) - NUM_NAMED
    return ", ".join(pieces[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def mark_of(status: str) -> Markup:
    """The sign of a status."""
    style = f"mark {status}" if status in MARKS else "mark"
    return tag("span", MARKS.get(status, "\N{WHITE CIRCLE}"), class_=style, aria_hidden="true")


def hash_of(sha256: str) -> Markup:
    """The first digits of a hash."""
    return tag("code", sha256[:SHORT_HASH], title=sha256)


def letter_of(place: int) -> str:
    """A, B, ..., Z, AA: the name of a group."""
    letter = chr(ord("A") + place % 26)
    return letter if place < 26 else letter_of(place // 26 - 1) + letter
