"""TextDataset: the bytes of text files as tokens."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from zerotrain.data.sources import find_sources
from zerotrain.data.windows import split

NUM_BYTE_VALUES = 256


class TextDataset:
    """Text, one token a byte, read through a memory map of all files joined in sorted order.

    The joined file is kept in `cache_dir` under a name that holds a fingerprint of the sources' paths, sizes and
    modification times: a change of any of them makes a new one.

    Args:
        path: a file, a folder, a glob pattern, or None for the standard library of the running Python
            (see `zerotrain.data.sources.find_sources`).
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows, at least 256.
        validation_fraction: part of the text kept for validation, between 0 and 1.
        cache_dir: where the joined file is kept; None for `$XDG_CACHE_HOME/zerotrain` or `~/.cache/zerotrain`.

    Raises:
        FileNotFoundError: `path` names nothing.
        ValueError: the text is empty or too short, an argument is out of range, or the cache cannot be written.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        seq_len: int,
        vocab_size: int = NUM_BYTE_VALUES,
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        if vocab_size < NUM_BYTE_VALUES:
            raise ValueError(f"data.vocab_size={vocab_size} is too small; bytes of text need {NUM_BYTE_VALUES}")
        self.vocab_size = vocab_size
        sources = find_sources(path)
        self.token_file = _join_files(sources, _cache_folder(cache_dir))
        self.train, self.validation = split(
            np.memmap(self.token_file, dtype=np.uint8, mode="r"),
            seq_len=seq_len,
            vocab_size=vocab_size,
            validation_fraction=validation_fraction,
            source=f"data.path={'null (the standard library)' if path is None else path}",
        )

    def encode(self, text: str) -> torch.Tensor:
        """Text to tokens: (num_bytes,) int64."""
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """Tokens to text; what is no UTF-8, as a generated or cut character may be, becomes U+FFFD."""
        values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return bytes(value for value in values if value < NUM_BYTE_VALUES).decode(errors="replace")


def _cache_folder(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotrain"


def _join_files(sources: list[Path], folder: Path) -> Path:
    """The file of all sources' bytes; made if it is not there yet.

    It is written under a temporary name and moved into place whole, so ranks that do this at the same time, or a
    process killed half way, leave no broken file under the final name.
    """
    joined = folder / f"text-{_fingerprint(sources)}.bin"
    if joined.exists():
        return joined
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            with open(Path(scratch, joined.name), "wb") as output:
                for source in sources:
                    with open(source, "rb") as file:
                        shutil.copyfileobj(file, output)
            os.replace(output.name, joined)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={folder} cannot take the joined text ({error}); give a folder that can be written"
        ) from error
    return joined


def _fingerprint(sources: list[Path]) -> str:
    lines = []
    for source in sources:
        status = source.stat()
        lines.append(f"{source.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]
