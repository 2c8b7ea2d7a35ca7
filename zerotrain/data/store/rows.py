"""Where the rows of a dataset lie: windows of seq_len tokens, one beside the other, in runs of a store's tokens.

A row is seq_len tokens and the one behind them, the label of the last. A run is a part of the store's row of tokens.
"""

from typing import Protocol

import numpy as np


class Rows(Protocol):
    """Which tokens of a store each row of a dataset has."""

    num_used: int
    """Tokens that are in a row, as an input or as a label."""

    def __len__(self) -> int: ...

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of the store that make up some rows, one behind the other.

        Args:
            indices: (num_rows,) int64 from 0 to len - 1.

        Returns:
            (num_parts,) where each part starts in the store, and its length; num_rows x (seq_len + 1) tokens together.
        """
        ...

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that says which tokens these are, to be hashed."""
        ...


class RowsWithinRuns:
    """Rows that lie each in one run, for runs cut out of a text: the label of a row's last token is the token behind
    it in the text. The tokens of a run after its last row are unused.

    Args:
        starts: (num_runs,) where each run starts in the store, rising.
        lengths: (num_runs,) tokens of each.
        seq_len: tokens of a row.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        self._starts, self._seq_len = np.ascontiguousarray(starts), seq_len
        num_rows = np.maximum(lengths - 1, 0) // seq_len
        self._first_rows = np.cumsum(num_rows) - num_rows
        self._num_rows = int(num_rows.sum())
        self.num_used = self._num_rows * seq_len + int((num_rows > 0).sum())

    def __len__(self) -> int:
        return self._num_rows

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        runs = np.searchsorted(self._first_rows, indices, side="right") - 1
        starts = self._starts[runs] + (indices - self._first_rows[runs]) * self._seq_len
        return starts, np.full(len(indices), self._seq_len + 1)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self._starts, self._first_rows


class RowsOverRuns:
    """Rows of the runs joined, for runs that are whole documents: after the last token of one comes the first of the
    next. Only the tokens after the last row of all are unused.

    Args:
        starts: (num_runs,) where each run starts in the store, rising.
        lengths: (num_runs,) tokens of each.
        seq_len: tokens of a row.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        self._starts, self._seq_len = np.ascontiguousarray(starts), seq_len
        self._ends = np.cumsum(lengths)
        """Of each run in the joined ones."""
        num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._num_rows = max(0, num_tokens - 1) // seq_len
        self.num_used = self._num_rows * seq_len + (self._num_rows > 0)

    def __len__(self) -> int:
        return self._num_rows

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first_tokens = indices * self._seq_len
        last_tokens = first_tokens + self._seq_len
        first_runs = np.searchsorted(self._ends, first_tokens, side="right")
        last_runs = np.searchsorted(self._ends, last_tokens, side="right")
        num_runs = last_runs - first_runs + 1
        # Each row's runs one after the other: (num_runs.sum(),) from here on.
        within_row = np.arange(num_runs.sum()) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
        runs = np.repeat(first_runs, num_runs) + within_row
        run_begins = np.where(runs > 0, self._ends[runs - 1], 0)
        begins = np.maximum(np.repeat(first_tokens, num_runs), run_begins)
        ends = np.minimum(np.repeat(last_tokens + 1, num_runs), self._ends[runs])
        return self._starts[runs] + begins - run_begins, ends - begins

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self._starts, self._ends
