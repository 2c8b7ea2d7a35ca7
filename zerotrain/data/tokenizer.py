"""From text to tokens: documents cut into pieces, tokenizers of Hugging Face, and the mark between documents.

A tokenizer takes about 150 bytes of memory for a byte of text it is given at once, so a document is cut after 64 kB, at
a place where that changes no token. The right places depend on the tokenizer: one that marks the beginning of
words marks the beginning of each text it is given too, be it in the middle of a word. So a cut is made where text of a
kind stands that tokenizers do not read as one, and where the tokenizer itself gives the text around it the same tokens
whole and cut. The piece grows until there is such a place.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zerotrain.files.kept_out import only_errors, refusal
from zerotrain.files.terminal import package

PIECE_NBYTES = 1 << 16
"""The size of a piece, unless no place is found to cut it."""
CONTEXT_NBYTES = 512
"""Bytes looked at on each side of a place."""
TRIES = 8
"""Places of each kind to try in a piece, from its end."""
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


Cut = Callable[[bytes, int, int], tuple[int, int] | None]
"""Finds a place to cut a text, of (text, low, high): the place is above `low`, up to `high`. It is the end of the piece
before it and the beginning of the one behind it, between which nothing or a space is left out; None where there is no
place. The text goes from the beginning of a piece to `CONTEXT_NBYTES` beyond `high`, or to the end of the document."""


def cut_anywhere(text: bytes, low: int, high: int) -> tuple[int, int] | None:
    """Cut at the end: bytes can be cut anywhere."""
    return high, high


def cut_behind_word(text: bytes, low: int, high: int) -> tuple[int, int]:
    """A cut before the last space or newline; anywhere in a text without them."""
    place = max(text.rfind(b" ", low + 1, high), text.rfind(b"\n", low + 1, high))
    return (high, high) if place < 0 else (place, place)


class ExactPlace:
    """Cuts where a tokenizer gives the same tokens whole and cut.

    Args:
        tokens_of: the tokens of a text.
    """

    def __init__(self, tokens_of: Callable[[str], list[int]]) -> None:
        self._tokens_of = tokens_of

    def __call__(self, text: bytes, low: int, high: int) -> tuple[int, int] | None:
        """The last place of the first kind with one."""
        for kind in PLACES:
            places = [match.end() for match in kind.finditer(text, low, high)]
            for place in reversed(places[-TRIES:]):
                if place > low and (next_start := self._next_start(text, place)) is not None:
                    return place, next_start
        return None

    def _next_start(self, text: bytes, place: int) -> int | None:
        """The beginning of the piece behind a place; None if the text cannot be cut there."""
        start, end = max(0, place - CONTEXT_NBYTES), place + CONTEXT_NBYTES
        whole, prefix = self._tokens(text[start:end]), self._tokens(text[start:place])
        # A tokenizer that puts a space before each text gets the one that stands there out of the way.
        for next_start in (place, place + 1) if text[place : place + 1] == b" " else (place,):
            if whole == prefix + self._tokens(text[next_start:end]):
                return next_start
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
            block = read(_BLOCK_NBYTES)
            is_all = not block
            text += block
        if len(text) <= limit:
            yield bytes(text), None
            return
        place = cut(bytes(text[: limit + CONTEXT_NBYTES]), limit // 2, limit)
        if place is None:
            limit *= 2
            continue
        end, next_start = place
        begun, limit = begun + next_start, PIECE_NBYTES
        yield bytes(text[:end]), begun
        del text[:next_start]


# Hugging Face tokenizers as text datasets use them. Needs the extra hf.


class TextTokenizer:
    """The tokenizer of a pretrained model.

    Args:
        name_or_path: a folder with a tokenizer, or the name of one on the Hugging Face hub.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such tokenizer.
    """

    def __init__(self, name_or_path: str) -> None:
        transformers = package("transformers", extra="hf", needed_by="data.tokenizer")
        try:
            with only_errors():
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        except BaseException as error:  # transformers raises all kinds for files that it cannot read
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of tokenizers, in Rust
                raise
            raise ValueError(
                f"data.tokenizer={name_or_path} (where unset, model.name_or_path) is neither a folder with a tokenizer "
                f"nor one that the Hugging Face hub can give: {refusal(name_or_path, error)}; null reads bytes"
            ) from error
        self.name = name_or_path
        # Some leave numbers out, and have tokens beyond their count.
        self.vocab_size = max([len(self._tokenizer), *(token + 1 for token in self._tokenizer.get_vocab().values())])
        self.token_dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        """The smallest unsigned integer for every token."""
        self.end_of_text: int | None = self._tokenizer.eos_token_id
        """The token behind a text; None where the tokenizer has none."""
        self.beginning_of_text: int | None = self._tokenizer.bos_token_id
        """The token before a text; None where the tokenizer has none."""
        self.special_tokens: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        """The special tokens by the names that a template knows, such as eos_token."""
        self.added_tokens: dict[str, int] = dict(self._tokenizer.added_tokens_encoder)
        """Tokens that are no parts of words, such as those that end a turn."""
        templates = self._tokenizer.chat_template or {}
        self.chat_templates: dict[str, str] = templates if isinstance(templates, dict) else {"default": templates}
        """By name; the only one is called default."""
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        """The tokenizer without transformers around it, which takes many texts on all cores, and does not warn of a
        text that is longer than the model's context; None for one that is written in Python."""
        if self._backend is not None:
            # Some are saved so that a text is cut or filled up to 512 tokens.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(getattr(self._tokenizer, "split_special_tokens", False))
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or it warns in each process that is started later
        self.has_offsets = self._backend is not None
        """Whether it says where in a text its tokens are."""

    def fingerprint(self) -> str:
        """Differs between tokenizers with other tokens."""
        described = repr(self._tokenizer) if self._backend is None else self._backend.to_str()
        marks = (described, self.end_of_text, self.beginning_of_text)
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text; nothing is added at the beginning or the end."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> np.ndarray:
        """(num_tokens,) of `token_dtype`, as `tokens_of`."""
        return np.array(self.tokens_of(text), dtype=self.token_dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode`, for many texts, on all cores; other threads of Python go on meanwhile."""
        if self._backend is None:
            return [self.encode(text) for text in texts]
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.token_dtype) for encoding in encoded]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, whether each lies in a span) of texts with spans of characters; it needs `has_offsets`."""
        results = []
        for encoding, text_spans in zip(
            self._backend.encode_batch(list(texts), add_special_tokens=False), spans, strict=True
        ):
            is_marked = np.zeros(len(encoding.ids), dtype=bool)
            for begin, end in text_spans:
                tokens = [encoding.char_to_token(place) for place in (begin, end - 1)]
                if None in tokens:  # no token has the space at an end
                    within = [
                        token for place in range(begin, end) if (token := encoding.char_to_token(place)) is not None
                    ]
                    tokens = [min(within), max(within)] if within else [0, -1]
                is_marked[tokens[0] : tokens[1] + 1] = True
            results.append((np.array(encoding.ids, dtype=self.token_dtype), is_marked))
        return results

    def require_known(self, vocab_size: int | None) -> int:
        """The tokens of a model of so many, None for as many as the tokenizer has. A ValueError where it has more."""
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ValueError(
                f"data.vocab_size={vocab_size} is too small; data.tokenizer={self.name} has {self.vocab_size} tokens"
            )
        return self.vocab_size if vocab_size is None else vocab_size

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, a tensor or numbers; those beyond the vocabulary have none."""
        return str(self._tokenizer.decode([int(token) for token in ids if token < self.vocab_size]))


# The mark between documents: one rule for every dataset of text.


DOCUMENT_ENDS = ("eos", "bos", "newline", "none")


class DocumentEnd:
    """Marks where a document ends, or begins.

    Args:
        tokenizer: None for bytes.
        choice: one of `DOCUMENT_ENDS`; None: eos where the tokenizer has one, else newline. A newline is put behind a
            document that does not end with one.

    Raises:
        ValueError: there is no such end of a document, or the tokenizer has none.
    """

    def __init__(self, tokenizer: TextTokenizer | None, choice: str | None = None) -> None:
        self._tokenizer, self._tokens = tokenizer, dict[str, int | None]()
        if tokenizer is not None:
            self._tokens = {"eos": tokenizer.end_of_text, "bos": tokenizer.beginning_of_text}
        if choice not in (None, *DOCUMENT_ENDS):
            raise ValueError(f"data.document_end={choice} is not known; it must be {', '.join(DOCUMENT_ENDS)} or null")
        if choice in ("eos", "bos") and self._tokens.get(choice) is None:
            whose = "bytes have" if tokenizer is None else f"the tokenizer of {tokenizer.name} has"
            raise ValueError(f"data.document_end={choice}: {whose} no such token; choose newline or none")
        if choice == "newline" and not self._has_newline():
            raise ValueError(
                "data.document_end=newline: the tokenizer makes no token of a newline; choose eos, bos or none"
            )
        if choice is None:
            choice = "eos" if self._tokens.get("eos") is not None else "newline" if self._has_newline() else "none"
        self.name = choice
        """The mark in use."""

    def marks(self, *, starts: bool, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before and behind those of a piece of a document, of `token_dtype` of the tokenizer.

        Args:
            starts, ends: whether the document does with this piece.
        """
        name = self.name
        mark = np.array([self._tokens.get(name) or 0], None if self._tokenizer is None else self._tokenizer.token_dtype)
        none = mark[:0]
        return mark if name == "bos" and starts else none, mark if name == "eos" and ends else none

    def _has_newline(self) -> bool:
        return self._tokenizer is None or self._tokenizer.tokens_of("a\n") != self._tokenizer.tokens_of("a")
