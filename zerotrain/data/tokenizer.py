"""Hugging Face tokenizers as text datasets use them. Needs the extra hf."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

READ_NUM_CHARACTERS = 1 << 20
"""Text is given to the tokenizer in pieces of so many characters and the rest of a line."""


class TextTokenizer:
    """The tokenizer of a pretrained model.

    Args:
        name_or_path: a folder with a tokenizer, or the name of one on the Hugging Face hub.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such tokenizer.
    """

    def __init__(self, name_or_path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                "data.tokenizer needs transformers, which is not installed; pip install 'zerotrain[hf]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"data.tokenizer={name_or_path} is neither a folder with a tokenizer nor one that the Hugging Face hub "
                f"can give: {reason}; null reads the text as bytes"
            ) from error
        self.vocab_size = len(self._tokenizer)

    @property
    def token_dtype(self) -> np.dtype:
        """The smallest unsigned integer that holds every token."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def fingerprint(self) -> str:
        """Differs between tokenizers that give other tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        described = repr(self._tokenizer) if backend is None else backend.to_str()
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        """(num_tokens,) of `token_dtype`; nothing is added at the beginning or the end."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=self.token_dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def write_tokens(self, sources: Iterable[Path], output: Any) -> None:
        """Append the tokens of text files to a file opened for bytes; what is no UTF-8 is read as U+FFFD."""
        for source in sources:
            with open(source, encoding="utf-8", errors="replace") as file:
                while text := file.read(READ_NUM_CHARACTERS):
                    output.write(self.encode(text + file.readline()).tobytes())
