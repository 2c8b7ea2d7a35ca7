"""TokenStore: one long row of tokens in one file or many, and the folder in which zerotrain keeps such a row.

A store's folder holds shards, which are tokens and nothing else, and what describes them:

    index.json      {"format": 1, "dtype": "uint16", "vocab_size": 50257, "tokenizer": null,
                     "shards": [{"name": "000000.bin", "tokens": 100000000}, ...],
                     "documents": "documents.bin", "num_documents": 81000}
    000000.bin      little-endian tokens of dtype (uint8, uint16 or uint32); the row goes on in the next shard
    documents.bin   little-endian uint64: where in the row each document starts, rising, the first at 0

`tokenizer` is a hash of the tokenizer, or null; `documents` is null where nobody knows where documents start. The index
is written last, so a folder with an index is complete. An index from before 2026-11-23 has no `num_documents`.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
from msgspec import Meta

from zerotrain.data.store.shards import Shard, ShardReader
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import FileName, Natural, UntrustedFileError, one_of, read_json, require_kind, shown

FORMAT = 1
INDEX_NAME = "index.json"
MAX_INDEX_NBYTES = 1 << 28
DOCUMENTS_NAME = "documents.bin"
DOCUMENT_NBYTES = 8
STORE_DTYPES = ("uint8", "uint16", "uint32")
MAX_VOCAB_SIZE = 1 << 32
"""As many as the widest of the dtypes has values."""
_PIECE = 1 << 20


class _ShardEntry(TypedDict):
    name: FileName
    tokens: Natural


class _StoreIndex(TypedDict):
    dtype: Annotated[str, one_of(*STORE_DTYPES)]
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_VOCAB_SIZE)]
    tokenizer: str | None
    shards: list[_ShardEntry]
    documents: FileName | None
    num_documents: NotRequired[Natural]


class TokenStore:
    """A row of tokens over the shards it lies in, read by number.

    Holds no token in memory, and a few open files. May be read by several threads, and pickled.

    Args:
        shards: the files, in order.
        dtype: of a token in all of them: integers of one to eight bytes.
        vocab_size: tokens are below this; None where nobody has said so.
        tokenizer: a hash of the tokenizer the tokens are of; None where it is not known.
        documents: reads where each document starts, (num_documents,) int64; None where there are no documents.

    Raises:
        OSError: a file is not there.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        dtype: np.dtype,
        *,
        vocab_size: int | None = None,
        tokenizer: str | None = None,
        documents: Callable[[], np.ndarray] | None = None,
    ) -> None:
        self.shards = tuple(shards)
        self.dtype = np.dtype(dtype)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.tokens = sum(shard.tokens for shard in self.shards)
        """Tokens of all shards."""
        self.sources: Sequence[Path] = ()
        """The files that the documents were read from, in order; empty where nobody knows."""
        self._read_documents = documents
        self._reader = ShardReader(self.shards, self.dtype)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "TokenStore":
        """The store in a folder.

        Raises:
            FileNotFoundError: the folder has no index, or a file that the index names is not there.
            ValueError: the index is of another format or cannot be understood, or a file has another size than it says.
        """
        folder = Path(folder)
        index = _read_index(folder / INDEX_NAME)
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        shards = [Shard(folder / each["name"], each["tokens"]) for each in index["shards"]]
        for shard in shards:
            _require_size(shard.path, shard.tokens * dtype.itemsize, f"{shard.tokens} tokens of {dtype.name}")
        tokens = sum(shard.tokens for shard in shards)
        documents = None
        if index["documents"] is not None:
            file = folder / index["documents"]
            num_documents = index.get("num_documents", _nbytes(file) // DOCUMENT_NBYTES)
            _require_size(file, num_documents * DOCUMENT_NBYTES, f"{num_documents} documents")
            documents = partial(_read_documents, file, tokens, num_documents)
        return cls(shards, dtype, vocab_size=index["vocab_size"], tokenizer=index["tokenizer"], documents=documents)

    @property
    def documents(self) -> np.ndarray | None:
        """The start of each document in the row, (num_documents,) int64, rising, the first 0; None if unknown. It is
        read from its file each time and not kept: for 1e8 documents it has 800 MB.

        Raises:
            FileNotFoundError, ValueError: it cannot be read, or is no such list.
        """
        return None if self._read_documents is None else self._read_documents()

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from number `start` up to but not `stop`, (stop - start,) of `dtype`.

        Raises:
            IndexError: the row has no such tokens.
            OSError: a file cannot be read, or was changed, cut short or removed since the store was opened.
        """
        return self.read_parts(np.array([start]), np.array([stop - start]))

    def read_parts(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Parts of the row, one behind the other: part i is the `lengths[i]` tokens from number `starts[i]` on.

        Returns:
            (lengths.sum(),) of `dtype`.

        Raises: as `read`.
        """
        if len(starts) and (starts.min() < 0 or lengths.min() < 0 or (starts + lengths).max() > self.tokens):
            raise IndexError(f"the tokens up to {(starts + lengths).max()} of {self.tokens}")
        return self._reader.read_parts(starts, lengths)

    def where(self, position: int) -> str:
        """The file of token `position` of the row, and its number in it, as a message says it."""
        shard, offset = self._reader.place(position)
        return f"{self.shards[shard].path}, token {offset}"

    def origin(self, position: int) -> str:
        """The document of token `position` of the row, and its number in it: by the file that was read where each is
        one document, else by the document's number."""
        documents = self.documents
        if documents is None:
            return self.where(position)
        number = int(np.searchsorted(documents, position, side="right")) - 1
        shard, _ = self._reader.place(position)
        one_each = len(self.sources) == len(documents)
        name = self.sources[number] if one_each else f"document {number} of {self.shards[shard].path.parent}"
        return f"{name}, token {position - documents[number]}"


def write_index(
    folder: str | os.PathLike[str],
    *,
    dtype: str,
    shards: Sequence[tuple[str, int]],
    vocab_size: int,
    tokenizer: str | None = None,
    documents: np.ndarray | None = None,
) -> None:
    """Make a store of the shards in a folder, which are there already: write their index, documents first.

    Args:
        dtype: of the tokens in the shards: one of `STORE_DTYPES`.
        shards: name and number of tokens of each file, in order.
        vocab_size: tokens are below this.
        tokenizer: a hash of the tokenizer.
        documents: (num_documents,) where in the row each document starts; None where nobody knows.

    Raises:
        FileNotFoundError: a shard is not there.
        ValueError: an argument is out of range, or a shard has another size.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    index = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "shards": [{"name": name, "tokens": int(tokens)} for name, tokens in shards],
        "documents": None if documents is None else DOCUMENTS_NAME,
        "num_documents": 0 if documents is None else len(documents),
    }
    _require_index(index, folder / INDEX_NAME)
    for name, tokens in shards:
        _require_size(folder / name, tokens * np.dtype(dtype).itemsize, f"{tokens} tokens of {dtype}")
    if documents is not None:
        _require_rising(documents, sum(tokens for _, tokens in shards), folder / DOCUMENTS_NAME)
        pieces = range(0, len(documents), _PIECE)
        with whole(folder / DOCUMENTS_NAME, lasting=True) as file:
            file.writelines(documents[at : at + _PIECE].astype("<u8").tobytes() for at in pieces)
    with whole(folder / INDEX_NAME, lasting=True) as file:
        file.write(json.dumps(index, indent=1).encode() + b"\n")


def _read_index(file: Path) -> dict[str, Any]:
    try:
        index = read_json(file, Any, max_nbytes=MAX_INDEX_NBYTES)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file.parent} has no {INDEX_NAME}; a store of tokens has one, written last: this one is not complete"
        ) from None
    except UntrustedFileError as error:
        raise ValueError(f"{file} is no index of a store ({error}); make the store again, or copy it again") from error
    _require_index(index, file)
    return dict(index)


def _require_index(index: Any, file: Path) -> None:
    """Check the fields of an index."""
    if not isinstance(index, dict) or "format" not in index:
        raise ValueError(f"{file} does not describe a store of tokens: it has no format")
    if index["format"] != FORMAT:
        raise ValueError(
            f"{file} has format {shown(index['format'])}, and this zerotrain reads format {FORMAT}; make the "
            "store anew, or read it with the zerotrain that wrote it"
        )
    try:
        require_kind(index, _StoreIndex)
    except UntrustedFileError as error:
        raise ValueError(f"{file}: {error}; make the store again") from None
    names = [INDEX_NAME, index["documents"], *(each["name"] for each in index["shards"])]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: shards: a file is named twice; make the store again")
    if index.get("num_documents") and index["documents"] is None:
        raise ValueError(f"{file}: num_documents: got {index['num_documents']} without documents; make the store again")


def _nbytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} is missing, and {INDEX_NAME} beside it names it; copy the store again"
        ) from None


def _require_size(file: Path, nbytes: int, what: str) -> None:
    found = _nbytes(file)
    if found != nbytes:
        raise ValueError(
            f"{file} has {found} bytes, but {INDEX_NAME} beside it says {nbytes} ({what}); make the store again, or "
            "copy it again"
        )


def _read_documents(file: Path, tokens: int, num_documents: int) -> np.ndarray:
    _require_size(file, num_documents * DOCUMENT_NBYTES, f"{num_documents} documents")
    documents = np.fromfile(file, dtype="<u8")
    _require_rising(documents, tokens, file)
    return documents.view("<i8")


def _require_rising(documents: np.ndarray, tokens: int, file: Path) -> None:
    """Check that these are starts of documents in a row of so many tokens."""
    rising = len(documents) > 0 and documents[0] == 0 and documents[-1] <= tokens
    for at in range(0, len(documents) if rising else 0, _PIECE):
        piece = documents[at : at + _PIECE + 1]
        rising = rising and bool((piece[1:] >= piece[:-1]).all())
    if not rising:
        raise ValueError(
            f"{file} does not hold the starts of documents in {tokens} tokens: they must rise from 0; make the store "
            "again, or copy it again"
        )
