"""HuggingFaceDataset: a map-style dataset of Hugging Face's `datasets`, from this machine's disk. Extra datasets."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from zerotrain.data.batches import IGNORED_LABEL, require_at_least, require_fraction
from zerotrain.data.text_files import CHAT_HINT, is_chat
from zerotrain.data.tokenizer import DocumentEnd, TextTokenizer
from zerotrain.files.terminal import package
from zerotrain.files.untrusted import printable

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
"""Ending of a file -> the builder of `datasets` for it."""
VALIDATION_SPLITS = ("validation", "valid", "dev", "test")
_LOOKED_AT_ROWS, _LOOKED_AT_TOKENS = 1000, 1 << 18
"""Rows and tokens to look at in a dataset, for an estimate of the rows cut."""


class HuggingFaceDataset:
    """Rows of one column of text or of tokens, or all columns as they are.

    A row is one item: its first `seq_len` + 1 tokens, and padding behind fewer, whose labels do not count; `summary`
    says how many are cut. Rows of null are left out. For text that is to be read whole whatever its length, there is
    `TextDataset`.

    Args:
        path: a folder that `save_to_disk` has written, or a .json, .jsonl, .parquet, .csv or .txt file.
        column: of text, with a tokenizer, or of lists of tokens, without; None: items are dicts of all columns, which
            hold numbers, lists of numbers or arrays and go to the model as its named arguments.
        labels_column: lists of labels beside the tokens of `column`, labels[t] of token t, -100 where there is none to
            learn; None: the tokens themselves. Shifted here, so that an item has the label of the next token.
        seq_len: tokens of an item; of no effect without a column.
        vocab_size: tokens the model knows; None for as many as the tokenizer has.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub.
        document_end: of each text, as `TextDataset` has it: "eos" or "bos" of the tokenizer, "newline" or "none"; None
            for eos where the tokenizer has one, else newline.
        split: the one to train on, where the folder has several splits.
        validation_split: the one to validate on; None: the first of `VALIDATION_SPLITS` there is, or else a part of
            `split`, its last rows.
        validation_fraction: that part, between 0 and 1; 0: none.

    Raises:
        ImportError: `datasets`, or for a tokenizer transformers, is not installed.
        FileNotFoundError: `path` is not there.
        ValueError: there is no such split or column, or an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        *,
        column: str | None = None,
        labels_column: str | None = None,
        seq_len: int = 128,
        vocab_size: int | None = None,
        tokenizer: str | None = None,
        document_end: str | None = None,
        split: str = "train",
        validation_split: str | None = None,
        validation_fraction: float = 0.1,
    ) -> None:
        require_at_least("seq_len", seq_len, 1)
        if column is None and (tokenizer or labels_column):
            raise ValueError(
                "data.column=null reads all columns as they are; give data.column, the column to tokenize or cut"
            )
        if document_end is not None and tokenizer is None:
            raise ValueError(
                f"data.document_end={document_end} ends texts, and data.tokenizer=null reads none; give "
                "data.tokenizer, or leave data.document_end out"
            )
        splits = _load(path)
        self.tokenizer = None if tokenizer is None else TextTokenizer(tokenizer)
        self.vocab_size = vocab_size if self.tokenizer is None else self.tokenizer.require_known(vocab_size)
        if self.tokenizer is not None:  # a dataset without one must not seem to have it
            self.encode, self.decode = self.tokenizer.encode, self.tokenizer.decode
            self.end_of_text = self.tokenizer.end_of_text
        used_splits = {name: splits[name] for name in _names_of_splits(splits, split, validation_split, path)}
        for setting, name in {"data.column": column, "data.labels_column": labels_column}.items():
            for rows in used_splits.values():
                if name is not None and name not in rows.column_names:
                    columns = ", ".join(rows.column_names) + (CHAT_HINT if is_chat(rows.column_names) else "")
                    raise ValueError(f"{setting}={name}: there is no such column; there are {columns}")
        rows_of_all = sum(map(len, used_splits.values()))
        for name, rows in used_splits.items():
            if column is not None and rows.data.column(column).null_count:
                is_valid = rows.data.column(column).is_valid().to_numpy(zero_copy_only=False)
                used_splits[name] = rows.select(np.flatnonzero(is_valid))
        self._num_null = rows_of_all - sum(map(len, used_splits.values()))
        ending = DocumentEnd(self.tokenizer, document_end)
        parts: list[Columns | Sequences] = [
            Columns(rows)
            if column is None
            else Sequences(
                rows.with_format(None), column, labels_column, seq_len, self.vocab_size, self.tokenizer, ending
            )
            for rows in _split_rows(list(used_splits.values()), validation_fraction, path)
        ]
        self.train, self.validation = self._parts = parts

    def summary(self) -> str:
        """One line: rows, rows cut, and rows left out."""
        train, validation = self._parts  # as they were: a user may have wrapped them
        line = f"{len(train):,} rows, {len(validation):,} to validate"
        if isinstance(train, Sequences):
            num_looked_at, num_cut = train.sample_lengths()
            sampled = "" if num_looked_at == len(train) else " looked at"
            if num_cut:
                line += f"; cut at data.seq_len={train.seq_len}: {num_cut:,} of {num_looked_at:,} rows{sampled}"
        return line + (f"; left out, since null: {self._num_null:,}" if self._num_null else "")


class Columns(Dataset[dict[str, Any]]):
    """All columns of each row, as tensors where they hold numbers."""

    draws = False  # nothing of the global generators

    def __init__(self, rows: Any) -> None:
        self._rows = rows.with_format("torch")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item: dict[str, Any] = self._rows[row]
        return item


@dataclass(eq=False)
class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(ids, labels) of each row, each (seq_len,) int64, labels one token later, -100 where there is none."""

    draws = False
    items: Any
    """Rows in Python's own types."""
    column: str
    labels_column: str | None
    seq_len: int
    vocab_size: int | None
    tokenizer: TextTokenizer | None
    ending: DocumentEnd

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a row.

        Raises:
            ValueError: it is neither text nor a list of tokens, has a token that is not below `vocab_size`, or as many
                labels as it has tokens are not there.
        """
        values = self.items[row]
        tokens = self._tokens(values[self.column])
        labels = tokens if self.labels_column is None else torch.tensor(values[self.labels_column])
        if len(labels) != len(tokens):
            raise ValueError(f"{len(labels)} labels in {self.labels_column}, but {len(tokens)} tokens")
        tokens = tokens[: self.seq_len + 1]
        if len(tokens) and self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"the token {int(tokens.max())} is not below data.vocab_size={self.vocab_size}")
        return self._whole(tokens[:-1], padding=0), self._whole(labels[1:], padding=IGNORED_LABEL)

    def sample_lengths(self) -> tuple[int, int]:
        """How many rows, evenly spread, were looked at, and how many of them are cut: all, where that takes no time."""
        tokens_left, num_looked_at, num_cut = _LOOKED_AT_TOKENS, 0, 0
        for row in range(0, len(self), -(-len(self) // _LOOKED_AT_ROWS)):
            num_tokens = len(self._tokens(self.items[row][self.column]))
            num_looked_at, num_cut = num_looked_at + 1, num_cut + (num_tokens > self.seq_len + 1)
            tokens_left -= num_tokens
            if tokens_left <= 0:
                break
        return num_looked_at, num_cut

    def _tokens(self, value: Any) -> torch.Tensor:
        """All tokens of a row."""
        if isinstance(value, str) != (self.tokenizer is not None):
            otherwise = "; data.tokenizer makes tokens of text" if isinstance(value, str) else ""
            expected = "a list of tokens" if self.tokenizer is None else "text"
            raise ValueError(f"data.column={self.column} holds a {type(value).__name__} and not {expected}{otherwise}")
        if self.tokenizer is None:
            return torch.tensor(value).long()
        prefix, suffix = self.ending.marks(starts=True, ends=True)
        if self.ending.name == "newline" and not value.endswith("\n"):
            value += "\n"
        tokens = np.concatenate([prefix, self.tokenizer.encode(value), suffix])
        return torch.from_numpy(tokens.astype(np.int64))

    def _whole(self, part: torch.Tensor, *, padding: int) -> torch.Tensor:
        row = torch.full((self.seq_len,), padding)
        row[: len(part)] = part[: self.seq_len]
        return row


def _load(path: str) -> dict[str, Any]:
    """The splits of a dataset, by name."""
    datasets = package("datasets", extra="datasets", needed_by="HuggingFaceDataset")
    place = Path(path).expanduser()
    if not place.is_dir() and not place.is_file():  # reading a FIFO would wait for ever
        what = "is neither a file nor a folder" if place.exists() else "does not exist"
        raise FileNotFoundError(f"data.path={path} {what}; give a folder that save_to_disk() has written, or a file")
    if place.is_dir():
        try:
            loaded = _read_quietly(lambda: datasets.load_from_disk(str(place)), path)
        except FileNotFoundError as error:
            raise ValueError(
                f"data.path={path} is a folder that save_to_disk() has not written; give one, or a single file"
            ) from error
    elif builder := BUILDERS.get(place.suffix.lower()):
        loaded = _read_quietly(lambda: datasets.load_dataset(builder, data_files=str(place)), path)
    else:
        raise ValueError(f"data.path={path} is no file that can be read: its name must end in {', '.join(BUILDERS)}")
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _read_quietly(load: Callable[[], Any], path: str) -> Any:
    """Raises: FileNotFoundError: as it is; ValueError: of anything else in one line, the first of the deepest cause."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs its errors too
    try:
        return load()
    except FileNotFoundError:
        raise
    except Exception as error:  # of datasets, pyarrow, pandas, json ...
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        problem = printable((str(cause).splitlines() or [type(cause).__name__])[0], keep="").rstrip(".")
        raise ValueError(
            f"data.path={path} cannot be read as a dataset: {problem}; write it anew, or copy it again"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def _names_of_splits(splits: dict[str, Any], split: str, validation_split: str | None, path: str) -> list[str]:
    """The splits to train on and, where there is one, to validate on. A ValueError where there is no such split."""
    for field, name in (("split", split), ("validation_split", validation_split)):
        if name is not None and name not in splits:
            raise ValueError(f"data.{field}={name}: data.path={path} has no such split; it has {', '.join(splits)}")
    if validation_split == split:
        raise ValueError(f"data.validation_split={split} is the split to train on; give another, or null")
    other = validation_split or next((name for name in VALIDATION_SPLITS if name in splits and name != split), None)
    return [split] if other is None else [split, other]


def _split_rows(parts: list[Any], fraction: float, path: str) -> list[Any]:
    """The rows to train on and to validate on. A ValueError where there are none, or nothing to split off."""
    train = parts[0]
    if len(parts) == 1:
        if fraction == 0 and len(train):
            return [train, train.select([])]
        require_fraction(fraction)
        num_trained = len(train) - max(1, round(len(train) * fraction))
        if num_trained >= 1:
            return [train.select(range(num_trained)), train.select(range(num_trained, len(train)))]
    if not all(map(len, parts)) or len(parts) == 1:
        raise ValueError(f"data.path={path} has {len(train)} rows; two are needed, to train on one and validate on one")
    return parts
