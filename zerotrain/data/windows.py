"""Sequences cut from one long row of tokens, and the split of that row into training and validation."""

import math

import numpy as np
import torch
from torch.utils.data import Dataset

CHUNK_TOKENS = 65536
"""About the length of a run of tokens that goes to one side of the split as a whole, where there are enough of them."""


class TokenWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `seq_len` tokens, one beside the other, within chunks of one row of tokens.

    A window and the label of its last token never leave their chunk, so two sets of chunks share no token.

    Args:
        tokens: (num_tokens,) of an unsigned integer dtype, usually memory-mapped.
        seq_len: tokens of a window.
        vocab_size: tokens allowed are below this.
        chunks: (num_chunks,) indices of the chunks to read.
        chunk_num_tokens: length of a chunk; chunk i starts at token i * chunk_num_tokens.
    """

    def __init__(
        self, tokens: np.ndarray, *, seq_len: int, vocab_size: int, chunks: np.ndarray, chunk_num_tokens: int
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.chunks = chunks
        self.chunk_num_tokens = chunk_num_tokens
        # One token more than the windows: the last one's last label.
        self.windows_per_chunk = (chunk_num_tokens - 1) // seq_len
        self.tokens_per_sequence = seq_len

    def __len__(self) -> int:
        return len(self.chunks) * self.windows_per_chunk

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read window `index`: (ids, labels), each (seq_len,) int64, labels one token later.

        Raises:
            IndexError: there is no such window.
            ValueError: a token is not below `vocab_size`.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        chunk, window = divmod(index, self.windows_per_chunk)
        start = int(self.chunks[chunk]) * self.chunk_num_tokens + window * self.seq_len
        tokens = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        check_tokens(tokens, vocab_size=self.vocab_size)
        # Two copies: who masks labels in place must not change the ids beside them.
        return torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])


def whole(tokens: np.ndarray, *, seq_len: int, vocab_size: int, source: str) -> TokenWindows:
    """All windows of a row of tokens.

    Args:
        source: what the tokens were read from, as the user named it ("data.path=corpus.bin").

    Raises:
        ValueError: it is shorter than one window and its last label.
    """
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"{source} holds {len(tokens)} tokens; data.seq_len={seq_len} needs at least {seq_len + 1}: "
            "give more data or a smaller data.seq_len"
        )
    return TokenWindows(
        tokens, seq_len=seq_len, vocab_size=vocab_size, chunks=np.arange(1), chunk_num_tokens=len(tokens)
    )


def split(
    tokens: np.ndarray, *, seq_len: int, vocab_size: int, validation_fraction: float, source: str
) -> tuple[TokenWindows, TokenWindows]:
    """Split a row of tokens into (train, validation).

    The row is cut into equal chunks, of which every 1/validation_fraction-th goes to validation: both sides then hold
    the same kinds of text, and a chunk is long enough that its neighbours say little about it.

    Args:
        source: what the tokens were read from, as the user named it ("data.path=corpus.txt").

    Raises:
        ValueError: the fraction is not in (0, 1), or a side would hold no window.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"data.validation_fraction={validation_fraction} is out of range; it must be between 0 and 1")
    # The fewest of which each side gets one.
    min_num_chunks = math.ceil(1 / min(validation_fraction, 1 - validation_fraction))
    num_chunks = min_num_chunks * max(1, len(tokens) // (CHUNK_TOKENS * min_num_chunks))
    chunk_num_tokens = len(tokens) // num_chunks
    if chunk_num_tokens < seq_len + 1:
        raise ValueError(
            f"{source} holds {len(tokens)} tokens; with data.seq_len={seq_len} and data.validation_fraction="
            f"{validation_fraction} it needs at least {min_num_chunks * (seq_len + 1)}: "
            "give more data or a smaller data.seq_len"
        )
    # The chunks at which the running total of validation chunks steps up.
    is_validation = np.diff(np.floor(np.arange(num_chunks + 1) * validation_fraction + 1e-9)) > 0
    train, validation = (
        TokenWindows(tokens, seq_len=seq_len, vocab_size=vocab_size, chunks=chunks, chunk_num_tokens=chunk_num_tokens)
        for chunks in (np.flatnonzero(~is_validation), np.flatnonzero(is_validation))
    )
    return train, validation


def check_tokens(tokens: np.ndarray, *, vocab_size: int, source: str = "data.path") -> None:
    """Check that every token is below `vocab_size`.

    Raises:
        ValueError: one is not.
    """
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise ValueError(
            f"{source} holds the token {largest}; tokens must be below data.vocab_size={vocab_size}: "
            f"set data.vocab_size to the tokenizer's, at least {largest + 1}"
        )
