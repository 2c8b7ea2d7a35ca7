"""TextDataset: text files as bytes, or as the tokens of a tokenizer."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from zerotrain.data.cache import kept_file
from zerotrain.data.places import cache_folder
from zerotrain.data.shards import Shard
from zerotrain.data.sources import find_sources
from zerotrain.data.store import TokenStore
from zerotrain.data.tokenizer import TextTokenizer
from zerotrain.data.windows import split

NUM_BYTE_VALUES = 256


class TextDataset:
    """Text, one token a byte or as a tokenizer cuts it, read from one file of all files joined in sorted order.

    The joined file is kept in `cache_dir` under a name that holds a fingerprint of the sources' paths, sizes and
    modification times, and of the tokenizer: a change of any of them makes a new one. One that does not hold what was
    written, or other text than the sources, is made anew, with a line on stderr that says why.

    Args:
        path: a file, a folder, a glob pattern, or None for the standard library of the running Python
            (see `zerotrain.data.sources.find_sources`).
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows, at least those of the tokenizer, or 256 of bytes; None for just as many as
            the tokenizer has.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub; None for bytes.
        validation_fraction: part of the text kept for validation, between 0 and 1.
        cache_dir: where the joined file is kept; None for `$XDG_CACHE_HOME/zerotrain` or `~/.cache/zerotrain`.

    Raises:
        FileNotFoundError: `path` names nothing.
        ImportError: a tokenizer is asked for, and transformers is not installed.
        ValueError: there is no such tokenizer, the text is empty or too short, an argument is out of range, or the
            cache cannot be written.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        seq_len: int,
        vocab_size: int | None = NUM_BYTE_VALUES,
        tokenizer: str | None = None,
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        if tokenizer is None and vocab_size is None:
            raise ValueError(
                "data.tokenizer=null, and data.vocab_size=null is as many tokens as it has; give data.tokenizer, a "
                "folder with one, or choose data=text, which reads bytes"
            )
        self.tokenizer = None if tokenizer is None else TextTokenizer(tokenizer)
        needed, needing = NUM_BYTE_VALUES, "bytes of text need"
        if self.tokenizer is not None:
            needed, needing = self.tokenizer.vocab_size, f"the tokenizer of {tokenizer} needs"
        self.vocab_size = needed if vocab_size is None else vocab_size
        if self.vocab_size < needed:
            raise ValueError(f"data.vocab_size={vocab_size} is too small; {needing} {needed}")
        self.token_file = _token_file(find_sources(path), self.tokenizer, cache_folder(cache_dir))
        dtype = np.dtype(np.uint8) if self.tokenizer is None else self.tokenizer.token_dtype
        self.train, self.validation = split(
            TokenStore([Shard(self.token_file, self.token_file.stat().st_size // dtype.itemsize)], dtype),
            seq_len=seq_len,
            vocab_size=self.vocab_size,
            validation_fraction=validation_fraction,
            source=f"data.path={'null (the standard library)' if path is None else path}",
        )

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


def _token_file(sources: list[Path], tokenizer: TextTokenizer | None, folder: Path) -> Path:
    """The file of all sources' tokens; made if it is not there yet."""
    try:
        if tokenizer is None:
            return kept_file(folder / f"text-{_fingerprint(sources)}.bin", sources, lambda file: _join(sources, file))
        name = f"tokens-{_fingerprint(sources)}-{tokenizer.fingerprint()}.bin"
        return kept_file(folder / name, sources, lambda file: tokenizer.write_tokens(sources, file))
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder} cannot take the joined text ({error}); give a folder that can be written"
        ) from error


def _join(sources: list[Path], output: BinaryIO) -> None:
    for source in sources:
        with open(source, "rb") as file:
            shutil.copyfileobj(file, output)


def _fingerprint(sources: list[Path]) -> str:
    lines = []
    for source in sources:
        status = source.stat()
        lines.append(f"{source.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]
