"""Sequences cut from a store of tokens, and the split of a store into training and validation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from zerotrain.data.store.rows import Rows, RowsWithinRuns
from zerotrain.data.store.split import split_rows
from zerotrain.data.store.store import TokenStore

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class TokenWindows(Dataset[Batch]):
    """Windows of `seq_len` tokens of a store, one beside the other.

    Args:
        store: is read when a window is.
        layout: which tokens each window has.
        seq_len: tokens of a window.
        vocab_size: tokens allowed are below this.
        source: what the tokens are read from, as the user named it ("data.path=corpus.bin").
        split: how these were chosen from the store, in words.
    """

    store: TokenStore
    layout: Rows
    seq_len: int
    vocab_size: int
    source: str
    split: str = "whole"

    def __post_init__(self) -> None:
        self.tokens_per_sequence = self.seq_len

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> Batch:
        """Read window `index`: (ids, labels), each (seq_len,) int64, labels one token later.

        Raises: as `rows`.
        """
        ids, labels = self.rows([index])
        return ids[0], labels[0]

    def rows(self, indices: Sequence[int]) -> Batch:
        """Read some windows: (ids, labels), each (len(indices), seq_len) int64, labels one token later.

        Raises:
            IndexError: there is no such window.
            OSError: a file cannot be read, or was changed, cut short or removed since it was opened.
            ValueError: a token is not below `vocab_size`.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(outside := wanted[(wanted < 0) | (wanted >= len(self))]):
            raise IndexError(f"sequence {outside[0]} of {len(self)}")
        starts, lengths = self.layout.parts(wanted)
        read = self.store.read_parts(starts, lengths)
        if len(unknown := np.flatnonzero((read < 0) | (read >= self.vocab_size))):
            part = int(np.searchsorted(np.cumsum(lengths), unknown[0], side="right"))
            position = int(starts[part] + unknown[0] - lengths[:part].sum())
            raise unknown_token(
                self.store, int(read[unknown[0]]), position, vocab_size=self.vocab_size, source=self.source
            )
        tokens = read.reshape(len(wanted), self.seq_len + 1)
        # Two copies: who masks labels in place must not change the ids beside them.
        ids, labels = (part.astype(np.int64, order="C") for part in (tokens[:, :-1], tokens[:, 1:]))
        return torch.from_numpy(ids), torch.from_numpy(labels)


def whole(store: TokenStore, *, seq_len: int, vocab_size: int, source: str) -> TokenWindows:
    """All windows of a store.

    Args:
        source: what the tokens are read from, as the user named it ("data.path=corpus.bin").

    Raises:
        ValueError: it is shorter than one window and its last label.
    """
    if store.tokens < seq_len + 1:
        raise ValueError(
            f"{source} holds {store.tokens} tokens; data.seq_len={seq_len} needs at least {seq_len + 1}: "
            "give more data or a smaller data.seq_len"
        )
    rows = RowsWithinRuns(np.array([0]), np.array([store.tokens]), seq_len)
    return TokenWindows(store, rows, seq_len, vocab_size, source)


def split(
    store: TokenStore, *, seq_len: int, vocab_size: int, validation_fraction: float, source: str
) -> tuple[TokenWindows, TokenWindows]:
    """Split a store into (train, validation), see `zerotrain.data.store.split`. At a fraction of 0 all is to train on,
    and validation is empty.

    Args:
        source: what the tokens are read from, as the user named it ("data.path=corpus.txt").

    Raises:
        OSError, ValueError: what the store says of its documents cannot be read.
        ValueError: the fraction is not in [0, 1), or a side would hold no window.
    """
    if validation_fraction == 0:
        none = RowsWithinRuns(np.array([], dtype=np.int64), np.array([], dtype=np.int64), seq_len)
        train_windows = whole(store, seq_len=seq_len, vocab_size=vocab_size, source=source)
        return train_windows, TokenWindows(store, none, seq_len, vocab_size, source)
    train, validation, unit = split_rows(store, seq_len=seq_len, validation_fraction=validation_fraction, source=source)
    words = f"by {unit}, {validation_fraction}"
    train_windows, validation_windows = (
        TokenWindows(store, rows, seq_len, vocab_size, source, words) for rows in (train, validation)
    )
    return train_windows, validation_windows


def unknown_token(store: TokenStore, token: int, position: int, *, vocab_size: int, source: str) -> ValueError:
    """The error of a token that is beyond the vocabulary, with its file and its number there."""
    if token < 0:
        return ValueError(f"{source} holds {token} ({store.where(position)}); tokens are numbers from 0 on")
    return ValueError(
        f"{source} holds the token {token} ({store.where(position)}); tokens must be below data.vocab_size="
        f"{vocab_size}: set data.vocab_size to the tokenizer's, at least {token + 1}"
    )
