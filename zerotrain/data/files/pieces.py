"""Cutting long documents into pieces that can be read, or tokenised, one by one.

A tokenizer takes about 150 bytes of memory for a byte of text it is given at once, so a document is cut after 64 kB, at
a place where that changes no token. The right places depend on the tokenizer: one that marks the beginning of
words marks the beginning of each text it is given too, be it in the middle of a word. So a cut is made where text of a
kind stands that tokenizers do not read as one, and where the tokenizer itself gives the text around it the same tokens
whole and cut. The piece grows until there is such a place.
"""

import re
from collections.abc import Callable, Iterator
from typing import Protocol

PIECE_NBYTES = 1 << 16
"""The size of a piece, unless no place is found to cut it."""
CONTEXT_NBYTES = 512
"""Bytes looked at on each side of a place."""
TRIES = 8
"""Places of each kind that are tried in a piece, from its end."""
_BLOCK_NBYTES = 1 << 20

PLACES = (
    re.compile(rb"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])"),
    re.compile(rb"(?<=[^\s]\n)(?=[^\s])"),
    re.compile(rb"(?<=[A-Za-z0-9])(?=[!-/:-@\[-`{-~][A-Za-z0-9])"),
    # Between a character and a full stop or comma of Chinese or Japanese behind which one follows.
    re.compile(rb"(?<=[\x80-\xbf])(?=(?:\xe3\x80\x81|\xe3\x80\x82|\xef\xbc\x8c)[\xc3-\xf4])"),
)
"""Kinds of places between two words. All lie between whole characters: beside an ASCII one, or before the first byte of
one. Invalid UTF-8 around them gives the same U+FFFD on each side."""


class Cut(Protocol):
    """Finds a place to cut a text."""

    def __call__(self, text: bytes, low: int, high: int) -> tuple[int, int] | None:
        """A place above `low`, up to `high`: the end of the piece before it, and the beginning of the one behind it,
        between which nothing or a space is left out. None where there is none.

        Args:
            text: from the beginning of a piece, to `CONTEXT_NBYTES` beyond `high` or to the end of the document.
        """


class AnyPlace:
    """Cuts anywhere: what is read as bytes has no places."""

    def __call__(self, text: bytes, low: int, high: int) -> tuple[int, int] | None:
        """At the end."""
        return high, high


class ExactPlace:
    """Cuts where a tokenizer gives the same tokens whole and cut.

    Args:
        tokens_of: the tokens of a text.
    """

    def __init__(self, tokens_of: Callable[[str], list[int]]) -> None:
        self._tokens_of = tokens_of

    def __call__(self, text: bytes, low: int, high: int) -> tuple[int, int] | None:
        """The last place of the first kind that has one."""
        for kind in PLACES:
            places = [match.end() for match in kind.finditer(text, low, high)]
            for place in reversed(places[-TRIES:]):
                if place > low and (after := self._after(text, place)) is not None:
                    return place, after
        return None

    def _after(self, text: bytes, place: int) -> int | None:
        """The beginning of the piece behind a place; None if the text cannot be cut there."""
        start, end = max(0, place - CONTEXT_NBYTES), place + CONTEXT_NBYTES
        whole, before = self._tokens(text[start:end]), self._tokens(text[start:place])
        # A tokenizer that puts a space before each text gets the one that stands there out of the way.
        for after in (place, place + 1) if text[place : place + 1] == b" " else (place,):
            if whole == before + self._tokens(text[after:end]):
                return after
        return None

    def _tokens(self, text: bytes) -> list[int]:
        return self._tokens_of(text.decode(errors="replace"))


def cut_text(read: Callable[[int], bytes], cut: Cut) -> Iterator[tuple[bytes, int | None]]:
    """A document in pieces. The end of a piece depends only on the text behind its beginning: read from there, the
    document gives the same pieces.

    Args:
        read: gives the next bytes of the document, at most so many; none at its end.

    Yields:
        A piece, and where in the document the next begins; None with the last. At least one piece.
    """
    text, begun, is_all, limit = bytearray(), 0, False, PIECE_NBYTES
    while True:
        while not is_all and len(text) < limit + CONTEXT_NBYTES:
            more = read(_BLOCK_NBYTES)
            is_all = not more
            text += more
        if len(text) <= limit:
            yield bytes(text), None
            return
        place = cut(bytes(text[: limit + CONTEXT_NBYTES]), limit // 2, limit)
        if place is None:
            limit *= 2
            continue
        end, after = place
        begun, limit = begun + after, PIECE_NBYTES
        yield bytes(text[:end]), begun
        del text[:after]
