"""Hugging Face tokenizers as text datasets use them. Needs the extra hf."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from zerotrain.files.kept_out import only_errors, refusal
from zerotrain.files.terminal import package


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
                f"data.tokenizer={name_or_path} is neither a folder with a tokenizer nor one that the Hugging Face hub "
                f"can give: {refusal(name_or_path, error)}; null reads the text as bytes"
            ) from error
        self.name = name_or_path
        # Some leave numbers out, and have tokens beyond their count.
        self.vocab_size = max([len(self._tokenizer), *(token + 1 for token in self._tokenizer.get_vocab().values())])
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        """The tokenizer without transformers around it, which takes many texts on all cores, and does not warn of a
        text that is longer than the model's context; None for one that is written in Python."""
        if self._backend is not None:
            # As some are saved: what is beyond 512 tokens would be lost, what is below be filled up.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(getattr(self._tokenizer, "split_special_tokens", False))
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or it warns in each process that is started later

    @property
    def token_dtype(self) -> np.dtype:
        """The smallest unsigned integer that holds every token."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def end_of_text(self) -> int | None:
        """The token that stands behind a text; None where the tokenizer has none."""
        return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)

    @property
    def beginning_of_text(self) -> int | None:
        """The token that stands before a text; None where the tokenizer has none."""
        return None if self._tokenizer.bos_token_id is None else int(self._tokenizer.bos_token_id)

    def fingerprint(self) -> str:
        """Differs between tokenizers that give other tokens."""
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
        return [np.array(each.ids, dtype=self.token_dtype) for each in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens."""
        return str(self._tokenizer.decode(list(ids)))
