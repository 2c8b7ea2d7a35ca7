"""Windows of tokens: the rows of a store, and their split into training and validation."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from zerotrain.data.batches import mix_bits, require_fraction
from zerotrain.data.store import TokenStore

# The places of a dataset's rows: windows of seq_len tokens, one beside the other, in runs of a store's tokens.
#
# A row is seq_len tokens and the one behind them, the label of the last. A run is a part of the store's row of
# tokens.


class Rows(ABC):
    """The tokens of a store in each row of a dataset.

    Args:
        starts: (num_runs,) where each run starts in the store, rising.
        borders: (num_runs,) a number of each by which its rows are found.
        seq_len: tokens of a row.
        num_rows: of all runs.
        num_used: tokens that are in a row, as an input or as a label.
    """

    def __init__(self, starts: np.ndarray, borders: np.ndarray, seq_len: int, num_rows: int, num_used: int) -> None:
        self._starts, self._borders, self._seq_len = np.ascontiguousarray(starts), borders, seq_len
        self._num_rows, self.num_used = num_rows, num_used

    @abstractmethod
    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of the store in some rows, one behind the other.

        Args:
            indices: (num_rows,) int64 from 0 to len - 1.

        Returns:
            (num_parts,) where each part starts in the store, and its length; num_rows x (seq_len + 1) tokens together.
        """

    def __len__(self) -> int:
        return self._num_rows

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that says which tokens these are, to be hashed."""
        return self._starts, self._borders


class RowsWithinRuns(Rows):
    """Rows that lie each in one run, for runs cut out of a text: the label of a row's last token is the token behind
    it in the text. The tokens of a run, of which there are `lengths`, after its last row are unused."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        num_rows = np.maximum(lengths - 1, 0) // seq_len
        first_rows, total = np.cumsum(num_rows) - num_rows, int(num_rows.sum())
        super().__init__(starts, first_rows, seq_len, total, total * seq_len + int((num_rows > 0).sum()))

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first_rows = self._borders
        runs = np.searchsorted(first_rows, indices, side="right") - 1
        starts = self._starts[runs] + (indices - first_rows[runs]) * self._seq_len
        return starts, np.full(len(indices), self._seq_len + 1)


class RowsOverRuns(Rows):
    """Rows of the runs joined, for runs that are whole documents: after the last token of one comes the first of the
    next. Only the tokens after the last row of all are unused."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        ends = np.cumsum(lengths)  # of each run in the joined ones
        num_rows = max(0, int(lengths.sum()) - 1) // seq_len
        super().__init__(starts, ends, seq_len, num_rows, num_rows * seq_len + (num_rows > 0))

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first_tokens, run_ends = indices * self._seq_len, self._borders
        last_tokens = first_tokens + self._seq_len
        first_runs = np.searchsorted(run_ends, first_tokens, side="right")
        last_runs = np.searchsorted(run_ends, last_tokens, side="right")
        num_runs = last_runs - first_runs + 1
        # Each row's runs one after the other: (num_runs.sum(),) from here on.
        within_row = np.arange(num_runs.sum()) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
        runs = np.repeat(first_runs, num_runs) + within_row
        run_begins = np.where(runs > 0, run_ends[runs - 1], 0)
        begins = np.maximum(np.repeat(first_tokens, num_runs), run_begins)
        ends = np.minimum(np.repeat(last_tokens + 1, num_runs), run_ends[runs])
        return self._starts[runs] + begins - run_begins, ends - begins


# The split of a store's tokens into training and validation: no token is on both sides, not even as a label.


CHUNK_TOKENS = 65536
CHUNK_ROWS = 64
"""Each chunk of the smaller side has at least so many tokens and rows, if there is enough text: neighbouring text then
tells little about it."""
_PIECE = 1 << 20
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""The step of SplitMix64, as `mix_bits`."""


def are_validation(start: int, count: int, fraction: float) -> np.ndarray:
    """For each of the documents `start` to `start + count - 1`, whether it is for validation; (count,) bool.

    A larger fraction takes all documents of a smaller one, and others.
    """
    numbers = np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)
    return (mix_bits(numbers * _STEP) >> np.uint64(11)) < np.uint64(round(fraction * (1 << 53)))


def _split_by_document(documents: np.ndarray, tokens: int, seq_len: int, fraction: float) -> tuple[Rows, Rows] | None:
    """Both sides of whole documents; None where a side's share is far from its part.

    Neighbours of one side are one run, so a run has ten documents at a fraction of 0.1, and takes 16 bytes.
    """
    is_validation = np.empty(len(documents), dtype=bool)
    for at in range(0, len(documents), _PIECE):
        piece = is_validation[at : at + _PIECE]
        piece[:] = are_validation(at, len(piece), fraction)
    changes = np.flatnonzero(is_validation[1:] != is_validation[:-1]) + 1
    starts = documents[np.concatenate([[0], changes])]
    lengths = np.diff(starts, append=tokens)
    of_validation = slice(0 if is_validation[0] else 1, None, 2)
    of_train = slice(1 if is_validation[0] else 0, None, 2)
    train, validation = (RowsOverRuns(starts[side], lengths[side], seq_len) for side in (of_train, of_validation))
    share = int(lengths[of_validation].sum()) / max(1, tokens)
    is_near = all(target / 2 <= got <= target * 2 for got, target in ((share, fraction), (1 - share, 1 - fraction)))
    return (train, validation) if is_near and len(train) and len(validation) else None


def _split_by_chunk(tokens: int, seq_len: int, fraction: float, source: str) -> tuple[Rows, Rows]:
    """Training, validation, training, validation ... in equal parts of the text, at least one.

    The borders lie on whole rows, and each piece has one token more, the label of its last row: what is not read is
    less than a row at the end of the text.
    """
    smaller = min(fraction, 1 - fraction)
    num_rows = (tokens - 2) // seq_len
    min_num_rows = math.ceil(1 / smaller - 1e-9)
    if num_rows < min_num_rows:
        raise ValueError(
            f"{source} holds {tokens} tokens; with data.seq_len={seq_len} and data.validation_fraction={fraction} it "
            f"needs at least {min_num_rows * seq_len + 2}: give more data or a smaller data.seq_len"
        )
    chunk_rows = max(math.ceil(CHUNK_TOKENS / seq_len), CHUNK_ROWS)
    num_pairs = max(1, int(num_rows * smaller) // chunk_rows)
    num_rows = (tokens - 2 * num_pairs) // seq_len
    pairs = np.arange(num_pairs + 1)
    quotient, remainder = divmod(num_rows, num_pairs)
    ends = pairs * quotient + pairs * remainder // num_pairs
    num_validation = np.diff(np.rint(pairs * (num_rows * fraction / num_pairs)).astype(np.int64))
    borders = np.empty(2 * num_pairs + 1, dtype=np.int64)
    borders[::2], borders[1::2] = ends, ends[1:] - num_validation
    starts = borders[:-1] * seq_len + np.arange(2 * num_pairs)
    lengths = np.diff(borders) * seq_len + 1
    return RowsWithinRuns(starts[::2], lengths[::2], seq_len), RowsWithinRuns(starts[1::2], lengths[1::2], seq_len)


# Sequences cut from a store of tokens, and the split of a store into training and validation.


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class TokenWindows(Dataset[Batch]):
    """Windows of `seq_len` tokens of a store, one beside the other.

    Args:
        store: is read when a window is.
        layout: which tokens each window has.
        seq_len: tokens of a window.
        vocab_size: tokens allowed are below this.
        source: the setting that names the tokens, as the user wrote it ("data.path=corpus.bin").
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
        rows = np.asarray(indices, dtype=np.int64)
        if len(outside := rows[(rows < 0) | (rows >= len(self))]):
            raise IndexError(f"sequence {outside[0]} of {len(self)}")
        starts, lengths = self.layout.parts(rows)
        read = self.store.read_parts(starts, lengths)
        if read.max(initial=0) >= self.vocab_size or read.min(initial=0) < 0:
            number = int(np.flatnonzero((read < 0) | (read >= self.vocab_size))[0])
            part = int(np.searchsorted(np.cumsum(lengths), number, side="right"))
            token, where = int(read[number]), self.store.where(int(starts[part] + number - lengths[:part].sum()))
            if token < 0:
                raise ValueError(f"{self.source} holds {token} ({where}); tokens are numbers from 0 on")
            raise ValueError(
                f"{self.source} holds the token {token} ({where}); tokens must be below data.vocab_size="
                f"{self.vocab_size}: set data.vocab_size to the tokenizer's, at least {token + 1}"
            )
        tokens = read.reshape(len(rows), self.seq_len + 1)
        # Two copies: a user who masks labels in place must not change the ids beside them.
        ids, labels = (part.astype(np.int64, order="C") for part in (tokens[:, :-1], tokens[:, 1:]))
        return torch.from_numpy(ids), torch.from_numpy(labels)


def whole(store: TokenStore, *, seq_len: int, vocab_size: int, source: str) -> TokenWindows:
    """All windows of a store.

    Args:
        source: the setting that names the tokens, as the user wrote it ("data.path=corpus.bin").

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
    store: TokenStore, *, seq_len: int, vocab_size: int, fraction: float, source: str
) -> tuple[TokenWindows, TokenWindows]:
    """Split a store into (train, validation). At a fraction of 0 all is to train on, and validation is empty.

    The split is by document where the store knows its documents: a hash of the document's number gives its side,
    whatever the other documents are, so none is cut. It is by chunk where the documents are unknown, or where the hash
    gives a side less than half or more than twice its share, as it may with few documents, or very unequal ones.

    Args:
        source: the setting that names the tokens, as the user wrote it ("data.path=corpus.txt").

    Raises:
        OSError, ValueError: the starts of the documents cannot be read.
        ValueError: the fraction is not in [0, 1), or a side would hold no window.
    """
    if fraction == 0:
        none = RowsWithinRuns(np.array([], dtype=np.int64), np.array([], dtype=np.int64), seq_len)
        train_windows = whole(store, seq_len=seq_len, vocab_size=vocab_size, source=source)
        return train_windows, TokenWindows(store, none, seq_len, vocab_size, source)
    require_fraction(fraction)
    documents, unit, sides = store.documents, "document", None
    if documents is not None:
        sides = _split_by_document(documents, store.tokens, seq_len, fraction)
    if sides is None:
        unit, sides = "chunk", _split_by_chunk(store.tokens, seq_len, fraction, source)
    words = f"by {unit}, {fraction}"
    train_windows, validation_windows = (
        TokenWindows(store, rows, seq_len, vocab_size, source, words) for rows in sides
    )
    return train_windows, validation_windows


# Facts about a dataset of tokens: one line for people, and values to compare between machines.


_END_NBYTES = 1 << 12
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def describe_tokens(train: TokenWindows, validation: TokenWindows, num_files: int | None = None) -> str:
    """Like "3 files, 1.2 G tokens, 1.1 M rows of 1,024 (0.1 % unused), validation 0.1 M rows (by chunk, 0.1)".

    Args:
        num_files: that the tokens were made of; None: those they lie in.
    """
    stores = _list_stores(train, validation)
    if num_files is None:
        num_files = sum(len(store.shards) for store in stores)
    tokens = sum(store.tokens for store in stores)
    unused = 1 - (train.layout.num_used + validation.layout.num_used) / tokens
    how = "files of its own" if len(stores) == 2 else train.split
    validated = f"validation {_count(len(validation))} rows ({how})" if len(validation) else "no validation"
    return (
        f"{num_files:,} file{'s' if num_files != 1 else ''}, {_count(tokens)} tokens, {_count(len(train))} rows of "
        f"{train.seq_len:,} ({unused:.1%} unused), {validated}"
    ).replace("%", " %")


def fingerprint_tokens(train: TokenWindows, validation: TokenWindows) -> dict[str, int | str]:
    """Values that are equal on machines with equal data, whatever folder it lies in, and hardly ever with other data.
    They depend only on the first and last tokens of each file.

    Raises:
        OSError: a file cannot be read.
    """
    stores, rows = _list_stores(train, validation), hashlib.sha256()
    for side in (train, validation):
        for array in side.layout.arrays():
            rows.update(array.data)
        rows.update(b"\n")
    return {
        "rows": len(train),
        "validation_rows": len(validation),
        "seq_len": train.seq_len,
        "tokens": sum(store.tokens for store in stores),
        "vocab_size": train.vocab_size,
        "dtype": " ".join(store.dtype.name for store in stores),
        "tokenizer": " ".join(store.tokenizer or "unknown" for store in stores),
        "files": _hash_of_files(stores),
        "split": f"{train.split} {rows.hexdigest()[:16]}",
    }


def _list_stores(train: TokenWindows, validation: TokenWindows) -> list[TokenStore]:
    return [train.store] if train.store is validation.store else [train.store, validation.store]


def _count(number: int) -> str:
    """Up to four digits as they are, and three of a larger number: 950, 1,100, 12.0 k, 1.2 M, 123 M."""
    if number < 10_000:
        return f"{number:,}"
    unit = next(unit for unit in _UNITS if number < 999.5 * _UNITS[unit] or unit == "T")
    scaled = number / _UNITS[unit]
    return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:,.0f} {unit}"


def _hash_of_files(stores: list[TokenStore]) -> str:
    """Hash of name, size and both ends of each file, and of the borders between stores."""
    hashed = hashlib.sha256()
    for store in stores:
        for shard in store.shards:
            hashed.update(f"{shard.path.name}\0{shard.tokens}\0".encode(errors="surrogateescape"))
            nbytes = shard.tokens * store.dtype.itemsize
            with Path(shard.path).open("rb") as file:
                file.seek(shard.first_byte)
                beginning = file.read(min(_END_NBYTES, nbytes))
                file.seek(shard.first_byte + nbytes - len(beginning))
                hashed.update(beginning + file.read(len(beginning)))
        hashed.update(b"\n")
    return hashed.hexdigest()[:16]
