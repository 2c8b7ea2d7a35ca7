"""TextDataset: text files as bytes, or as the tokens of a tokenizer."""

from collections.abc import Sequence

import numpy as np
import torch

from zerotrain.data.preparing.prepare import NUM_BYTE_VALUES
from zerotrain.data.preparing.prepared import prepared, recipe_of
from zerotrain.data.store.facts import describe_tokens, fingerprint_tokens
from zerotrain.data.store.windows import split


class TextDataset:
    """Text, one token a byte or as a tokenizer cuts it; its documents one behind the other, files in sorted order.

    A single file of bytes is read where it lies. Other text becomes a store of tokens in `cache_dir`, under a name that
    holds hashes of the files' paths, sizes and modification times, and of what is made of them: a change of any of
    these makes a new one. A store that is damaged, or holds other text than the files, is made anew, with a line on
    stderr that says why.

    Args:
        path: a file, a folder, a glob pattern, or None for the standard library of the running Python
            (see `zerotrain.data.files.sources.find_sources`).
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows, at least those of the tokenizer, or 256 of bytes; None for just as many as
            the tokenizer has.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub; None for bytes.
        document_end: what stands between documents: "eos" or "bos" of the tokenizer, "newline" where a document does
            not end with one, or "none"; None for eos where the tokenizer has one, else newline. A file of plain text is
            a document, and so are a line of .jsonl and a row of .parquet.
        text_field: where the text is in an object of .jsonl, or the column in a .parquet file.
        validation_fraction: part of the text kept for validation, between 0 and 1; 0: none.
        cache_dir: where stores are kept; None for `$XDG_CACHE_HOME/zerotrain` or `~/.cache/zerotrain`.

    Raises:
        FileNotFoundError: `path` names nothing.
        ImportError: a tokenizer is asked for, and transformers is not installed; or files need a package that is not.
        ValueError: there is no such tokenizer, the text is empty or too short, a file is broken, an argument is out of
            range, or the cache cannot be written.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        seq_len: int,
        vocab_size: int | None = NUM_BYTE_VALUES,
        tokenizer: str | None = None,
        document_end: str | None = None,
        text_field: str = "text",
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        if tokenizer is None and vocab_size is None:
            raise ValueError(
                "data.vocab_size=null takes the size from the tokenizer, and data.tokenizer=null; give data.tokenizer, "
                "a folder with one, or choose data=text, which reads bytes"
            )
        recipe, cache = recipe_of(
            path, tokenizer=tokenizer, document_end=document_end, text_field=text_field, cache_dir=cache_dir
        )
        self.tokenizer, self._num_files = recipe.tokenizer, len(recipe.sources.files)
        needed, needing = NUM_BYTE_VALUES, "bytes of text need"
        if self.tokenizer is not None:
            needed, needing = self.tokenizer.vocab_size, f"the tokenizer of {tokenizer} needs"
        self.vocab_size = needed if vocab_size is None else vocab_size
        if self.vocab_size < needed:
            raise ValueError(f"data.vocab_size={vocab_size} is too small; {needing} {needed}")
        self.store = prepared(recipe, cache)
        self.train, self.validation = self._parts = split(
            self.store,
            seq_len=seq_len,
            vocab_size=self.vocab_size,
            validation_fraction=validation_fraction,
            source=recipe.sources.path,
        )

    def summary(self) -> str:
        """One line: files, tokens, rows, what is unused, validation rows."""
        return describe_tokens(*self._parts, self._num_files)  # the parts as they were: a user may have wrapped them

    def fingerprint(self) -> dict[str, int | str]:
        """Values that are equal on machines with equal data, see `fingerprint_tokens`.

        Raises:
            OSError: a file cannot be read.
        """
        return fingerprint_tokens(*self._parts) | {"tokenizer": self.store.tokenizer or "bytes"}

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a text; None of bytes, and where the tokenizer has none."""
        return None if self.tokenizer is None else self.tokenizer.end_of_text

    def encode(self, text: str) -> torch.Tensor:
        """Text to tokens: (num_tokens,) int64."""
        if self.tokenizer is not None:
            return torch.from_numpy(self.tokenizer.encode(text).astype(np.int64))
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """Tokens to text; what is no UTF-8, as a generated or cut character may be, becomes U+FFFD."""
        values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        if self.tokenizer is not None:
            return self.tokenizer.decode(value for value in values if value < self.tokenizer.vocab_size)
        return bytes(value for value in values if value < NUM_BYTE_VALUES).decode(errors="replace")
