"""HuggingFaceDataset: a map-style dataset of Hugging Face's `datasets`, from this machine's disk. Extra datasets."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from zerotrain.data.batches import IGNORED_LABEL
from zerotrain.data.tokenizer import TextTokenizer

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
"""Ending of a file -> what `datasets` reads it with."""
VALIDATION_SPLITS = ("validation", "valid", "dev", "test")


class HuggingFaceDataset:
    """Rows of one column of text or of tokens, or all columns as they are.

    A row is one item: its first `seq_len` + 1 tokens, and padding behind fewer, whose labels do not count. For text
    that is to be read whole whatever its length, there is `TextDataset`.

    Args:
        path: a folder that `save_to_disk` has written, or a .json, .jsonl, .parquet, .csv or .txt file.
        column: of text, with a tokenizer, or of lists of tokens, without; None: items are dicts of all columns, which
            hold numbers, lists of numbers or arrays and go to the model as its named arguments.
        labels_column: lists of labels beside the tokens of `column`, labels[t] of token t, -100 where there is none to
            learn; None: the tokens themselves. Shifted here, so that an item has the label of the next token.
        seq_len: tokens of an item; of no effect without a column.
        vocab_size: tokens the model knows; None for as many as the tokenizer has.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub.
        split: what is trained on, where the folder has several splits.
        validation_split: what is validated on; None: the first of `VALIDATION_SPLITS` that there is, or else a part of
            `split`, its last rows.
        validation_fraction: that part, between 0 and 1.

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
        split: str = "train",
        validation_split: str | None = None,
        validation_fraction: float = 0.1,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        if column is None and (tokenizer or labels_column):
            raise ValueError("data.column=null reads all columns as they are; give data.column, the one to be cut")
        splits = _load(path)
        self.tokenizer = None if tokenizer is None else TextTokenizer(tokenizer)
        known = None if self.tokenizer is None else self.tokenizer.vocab_size
        self.vocab_size = known if vocab_size is None else vocab_size
        if known is not None and self.vocab_size is not None and self.vocab_size < known:
            raise ValueError(
                f"data.vocab_size={vocab_size} is too small; data.tokenizer={tokenizer} has {known} tokens"
            )
        if self.tokenizer is not None:  # what has none must not seem to have one
            self.encode, self.decode = self.tokenizer.encode, self._decode
        train, validation = _two(splits, split, validation_split, validation_fraction, path)
        for name in filter(None, (column, labels_column)):
            if name not in train.column_names:
                raise ValueError(
                    f"data.column={name}: there is no such column; there are {_listed(train.column_names)}"
                )
        parts: list[Dataset[Any]] = [
            Columns(rows)
            if column is None
            else Sequences(rows, column, labels_column, seq_len, self.vocab_size, self.tokenizer)
            for rows in (train, validation)
        ]
        self.train, self.validation = parts

    def _decode(self, ids: torch.Tensor) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(token for token in ids.tolist() if token < self.tokenizer.vocab_size)


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


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(ids, labels) of each row, each (seq_len,) int64, labels one token later, -100 where there is none."""

    draws = False

    def __init__(
        self,
        rows: Any,
        column: str,
        labels_column: str | None,
        seq_len: int,
        vocab_size: int | None,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self._rows = rows.with_format(None)
        self._column, self._labels_column = column, labels_column
        self.seq_len, self._vocab_size, self._tokenizer = seq_len, vocab_size, tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a row.

        Raises:
            ValueError: it is neither text nor a list of tokens, has a token that is not below `vocab_size`, or as many
                labels as it has tokens are not there.
        """
        values = self._rows[row]
        tokens = self._tokens(values[self._column])
        labels = tokens if self._labels_column is None else torch.tensor(values[self._labels_column])
        if len(labels) != len(tokens):
            raise ValueError(f"{len(labels)} labels in {self._labels_column}, but {len(tokens)} tokens")
        return self._whole(tokens[:-1], padding=0), self._whole(labels[1:], padding=IGNORED_LABEL)

    def _tokens(self, value: Any) -> torch.Tensor:
        if isinstance(value, str) != (self._tokenizer is not None):
            otherwise = "; data.tokenizer makes tokens of text" if isinstance(value, str) else ""
            wanted = "a list of tokens" if self._tokenizer is None else "text"
            raise ValueError(f"data.column={self._column} holds a {type(value).__name__} and not {wanted}{otherwise}")
        tokens = torch.tensor(value if self._tokenizer is None else self._tokenizer.encode(value).tolist())
        tokens = tokens[: self.seq_len + 1].long()
        if len(tokens) and self._vocab_size is not None and int(tokens.max()) >= self._vocab_size:
            raise ValueError(f"the token {int(tokens.max())} is not below data.vocab_size={self._vocab_size}")
        return tokens

    def _whole(self, part: torch.Tensor, *, padding: int) -> torch.Tensor:
        row = torch.full((self.seq_len,), padding)
        row[: len(part)] = part[: self.seq_len]
        return row


def _load(path: str) -> dict[str, Any]:
    """The splits of a dataset, by name."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "HuggingFaceDataset needs datasets, which is not installed; pip install 'zerotrain[datasets]'"
        ) from error
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(
            f"data.path={path} does not exist; give a folder that save_to_disk() has written, or a file"
        )
    if place.is_dir():
        try:
            loaded = datasets.load_from_disk(str(place))
        except FileNotFoundError as error:
            raise ValueError(
                f"data.path={path} is a folder that save_to_disk() has not written; give one, or a single file"
            ) from error
    elif builder := BUILDERS.get(place.suffix):
        loaded = datasets.load_dataset(builder, data_files=str(place))
    else:
        raise ValueError(f"data.path={path} is no file that can be read: its name must end in {_listed(BUILDERS)}")
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _two(splits: dict[str, Any], split: str, validation_split: str | None, fraction: float, path: str) -> list[Any]:
    """The rows to train on and to validate on.

    Raises:
        ValueError: there is no such split, or nothing to split off.
    """
    for field, name in (("split", split), ("validation_split", validation_split)):
        if name is not None and name not in splits:
            raise ValueError(f"data.{field}={name}: data.path={path} has no such split; it has {_listed(splits)}")
    if validation_split == split:
        raise ValueError(f"data.validation_split={split} is what is trained on; give another, or null")
    found = validation_split or next((name for name in VALIDATION_SPLITS if name in splits and name != split), None)
    train = splits[split]
    if found is not None:
        return [train, splits[found]]
    if not 0 < fraction < 1:
        raise ValueError(f"data.validation_fraction={fraction} is out of range; it must be between 0 and 1")
    kept = len(train) - max(1, round(len(train) * fraction))
    if kept < 1:
        raise ValueError(f"data.path={path} has {len(train)} rows; two are needed, to train on one and validate on one")
    return [train.select(range(kept)), train.select(range(kept, len(train)))]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
