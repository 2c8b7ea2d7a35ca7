"""The mark between documents: one rule for every dataset of text."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerotrain.data.preparing.tokenizer import TextTokenizer

DOCUMENT_ENDS = ("eos", "bos", "newline", "none")


@dataclass(frozen=True)
class DocumentEnd:
    """Marks where a document ends, or begins.

    Args:
        tokenizer: None for bytes.
        given: one of `DOCUMENT_ENDS`; None: eos where the tokenizer has one, else newline. A newline is put behind a
            document that does not end with one.

    Raises:
        ValueError: there is no such end of a document, or the tokenizer has none.
    """

    tokenizer: TextTokenizer | None
    given: str | None = None

    def __post_init__(self) -> None:
        given, tokenizer = self.given, self.tokenizer
        if given not in (None, *DOCUMENT_ENDS):
            raise ValueError(f"data.document_end={given} is not known; it must be {', '.join(DOCUMENT_ENDS)} or null")
        if given in ("eos", "bos") and self._mark(given) is None:
            whose = "bytes have" if tokenizer is None else f"the tokenizer of {tokenizer.name} has"
            raise ValueError(f"data.document_end={given}: {whose} no such token; choose newline or none")
        if given == "newline" and not self._has_newline():
            raise ValueError(
                "data.document_end=newline: the tokenizer makes no token of a newline; choose eos, bos or none"
            )

    @cached_property
    def name(self) -> str:
        """Which it is."""
        if self.given is not None:
            return self.given
        if self._mark("eos") is not None:
            return "eos"
        return "newline" if self._has_newline() else "none"

    def marks(self, *, starts: bool, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before and behind those of a piece of a document, of `token_dtype` of the tokenizer.

        Args:
            starts, ends: whether the document does with this piece.
        """
        name = self.name
        mark = np.array([self._mark(name) or 0], None if self.tokenizer is None else self.tokenizer.token_dtype)
        return mark[: name == "bos" and starts], mark[: name == "eos" and ends]

    def _mark(self, name: str) -> int | None:
        if self.tokenizer is None or name not in ("eos", "bos"):
            return None
        return self.tokenizer.end_of_text if name == "eos" else self.tokenizer.beginning_of_text

    def _has_newline(self) -> bool:
        return self.tokenizer is None or self.tokenizer.tokens_of("a\n") != self.tokenizer.tokens_of("a")
