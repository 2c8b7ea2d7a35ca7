"""TokenFiles: tokens of any tokenizer, as nanoGPT stores them."""

import os
from pathlib import Path

import numpy as np

from zerotrain.data.windows import check_tokens, split, whole

TOKEN_DTYPE = np.dtype("<u2")
NUM_CHECKED_TOKENS = 1 << 24
"""Tokens checked when a file is opened; the others are checked as they are read."""


class TokenFiles:
    """Files of little-endian uint16 tokens and nothing else, memory-mapped.

    Args:
        path: a file, or a folder with `train.bin` and, if it likes, `val.bin`.
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows; every token in the files must be below.
        validation_path: a file of validation tokens. Without it and without a `val.bin`, they are split off.
        validation_fraction: part split off for validation where it has no file of its own, between 0 and 1.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is empty, odd in size, too short or holds a token that is too large, or an argument is out
            of range.
    """

    def __init__(
        self,
        path: str,
        *,
        seq_len: int,
        vocab_size: int,
        validation_path: str | None = None,
        validation_fraction: float = 0.1,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        self.vocab_size = vocab_size
        train_file, validation_file = _find_files(path, validation_path)
        source = f"data.path={path}"
        tokens = _map_tokens(train_file, vocab_size=vocab_size, source=source)
        if validation_file is None:
            self.train, self.validation = split(
                tokens,
                seq_len=seq_len,
                vocab_size=vocab_size,
                validation_fraction=validation_fraction,
                source=source,
            )
            return
        self.train = whole(tokens, seq_len=seq_len, vocab_size=vocab_size, source=source)
        source = f"data.validation_path={validation_file}"
        tokens = _map_tokens(validation_file, vocab_size=vocab_size, source=source)
        self.validation = whole(tokens, seq_len=seq_len, vocab_size=vocab_size, source=source)


def _find_files(path: str, validation_path: str | None) -> tuple[Path, Path | None]:
    """The files of training and of validation tokens; no validation file where they are to be split off."""
    train_file = Path(path).expanduser()
    validation_file = Path(validation_path).expanduser() if validation_path is not None else None
    if train_file.is_dir():
        if validation_file is None and (train_file / "val.bin").exists():
            validation_file = train_file / "val.bin"
        train_file = train_file / "train.bin"
        if not train_file.exists():
            raise FileNotFoundError(
                f"data.path={path} is a folder without train.bin; give a .bin file or such a folder"
            )
    if not train_file.exists():
        raise FileNotFoundError(
            f"data.path={path} does not exist; give a file of uint16 tokens, or a folder with train.bin and val.bin"
        )
    if validation_file is not None and not validation_file.exists():
        raise FileNotFoundError(
            f"data.validation_path={validation_path} does not exist; give a file of uint16 tokens, "
            "or null to split validation off data.path"
        )
    return train_file, validation_file


def _map_tokens(file: Path, *, vocab_size: int, source: str) -> np.ndarray:
    nbytes = file.stat().st_size
    if nbytes == 0 or nbytes % TOKEN_DTYPE.itemsize:
        raise ValueError(f"{source} has {nbytes} bytes; a file of uint16 tokens has an even number of at least 2")
    if not os.access(file, os.R_OK):
        raise ValueError(f"{source} cannot be read; give it read permission or choose another file")
    tokens = np.memmap(file, dtype=TOKEN_DTYPE, mode="r")
    check_tokens(tokens[:NUM_CHECKED_TOKENS], vocab_size=vocab_size, source=source)
    return tokens
