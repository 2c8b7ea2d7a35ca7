"""The split of a store's tokens into training and validation: no token is on both sides, not even as a label."""

import math

import numpy as np

from zerotrain.data.store.rows import Rows, RowsOverRuns, RowsWithinRuns
from zerotrain.data.store.store import TokenStore

CHUNK_TOKENS = 65536
CHUNK_ROWS = 64
"""Each chunk of the smaller side has at least so many tokens and rows, if there is enough text: neighbouring text then
tells little about it."""
_PIECE = 1 << 20
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Constants of SplitMix64 (G. Steele and others, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


def split_rows(store: TokenStore, *, seq_len: int, validation_fraction: float, source: str) -> tuple[Rows, Rows, str]:
    """Which rows are for training and which for validation, and what they were split by.

    By document where the store knows its documents: a hash of the document's number says where it goes, whatever the
    other documents are, so none is cut. By chunk where it does not, or where the hash gives a side less than half or
    more than twice its share, as it may with few documents, or very unequal ones.

    Args:
        source: what the tokens were read from, as the user named it ("data.path=corpus.bin").

    Returns:
        The rows of training and of validation, and "document" or "chunk".

    Raises:
        OSError, ValueError: the documents cannot be read.
        ValueError: the fraction is not in (0, 1), or a side would hold no row.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"data.validation_fraction={validation_fraction} is out of range; it must be 0 or between 0 and 1"
        )
    documents = store.documents
    if documents is not None:
        sides = _by_document(documents, store.tokens, seq_len, validation_fraction)
        if sides is not None:
            return *sides, "document"
    return *_by_chunk(store.tokens, seq_len, validation_fraction, source), "chunk"


def are_validation(first: int, count: int, fraction: float) -> np.ndarray:
    """Which of the documents `first` to `first + count - 1` are for validation, (count,) bool.

    A larger fraction takes all documents of a smaller one, and others.
    """
    mixed = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) < np.uint64(round(fraction * (1 << 53)))


def _by_document(documents: np.ndarray, tokens: int, seq_len: int, fraction: float) -> tuple[Rows, Rows] | None:
    """Both sides of whole documents; None where a side's share is far from what was asked for.

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
    is_near = all(wanted / 2 <= got <= wanted * 2 for got, wanted in ((share, fraction), (1 - share, 1 - fraction)))
    return (train, validation) if is_near and len(train) and len(validation) else None


def _by_chunk(tokens: int, seq_len: int, fraction: float, source: str) -> tuple[Rows, Rows]:
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
