"""The places of a dataset's rows: windows of seq_len tokens, one beside the other, in runs of a store's tokens.

A row is seq_len tokens and the one behind them, the label of the last. A run is a part of the store's row of tokens.
"""

from abc import ABC, abstractmethod

import numpy as np


class Rows(ABC):
    """Which tokens of a store each row of a dataset has.

    Args:
        starts: (num_runs,) where each run starts in the store, rising.
        lengths: (num_runs,) tokens of each.
        seq_len: tokens of a row.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> None:
        self._starts, self._seq_len = np.ascontiguousarray(starts), seq_len
        self._borders, self._num_rows, self.num_used = self._counted(lengths)

    @abstractmethod
    def _counted(self, lengths: np.ndarray) -> tuple[np.ndarray, int, int]:
        """(a number of each run by which its rows are found, rows, tokens that are in a row, as an input or as a
        label)."""

    @abstractmethod
    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of the store that make up some rows, one behind the other.

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
    it in the text. The tokens of a run after its last row are unused."""

    def _counted(self, lengths: np.ndarray) -> tuple[np.ndarray, int, int]:
        num_rows = np.maximum(lengths - 1, 0) // self._seq_len
        first_rows, total = np.cumsum(num_rows) - num_rows, int(num_rows.sum())
        return first_rows, total, total * self._seq_len + int((num_rows > 0).sum())

    def parts(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first_rows = self._borders
        runs = np.searchsorted(first_rows, indices, side="right") - 1
        starts = self._starts[runs] + (indices - first_rows[runs]) * self._seq_len
        return starts, np.full(len(indices), self._seq_len + 1)


class RowsOverRuns(Rows):
    """Rows of the runs joined, for runs that are whole documents: after the last token of one comes the first of the
    next. Only the tokens after the last row of all are unused."""

    def _counted(self, lengths: np.ndarray) -> tuple[np.ndarray, int, int]:
        ends = np.cumsum(lengths)  # of each run in the joined ones
        num_rows = max(0, int(lengths.sum()) - 1) // self._seq_len
        return ends, num_rows, num_rows * self._seq_len + (num_rows > 0)

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
