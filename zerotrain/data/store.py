"""TokenStore: one long row of tokens in one file or many, and the folder in which zerotrain keeps such a row.

A store's folder holds shards, which are tokens and nothing else, and an index that describes them:

    index.json      {"format": 1, "dtype": "uint16", "vocab_size": 50257, "tokenizer": null,
                     "shards": [{"name": "000000.bin", "tokens": 100000000}, ...],
                     "documents": "documents.bin", "num_documents": 81000}
    000000.bin      little-endian tokens of dtype (uint8, uint16 or uint32); the row goes on in the next shard
    documents.bin   little-endian uint64: where in the row each document starts, rising, the first at 0

`tokenizer` is a hash of the tokenizer, or null; `documents` is null where nobody knows where documents start. The index
is written last, so a folder with an index is complete.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from zerotrain.files.lock import whole
from zerotrain.files.untrusted import FileName, Natural, UntrustedFileError, one_of, read_json, require_kind, shown

# Files of tokens are read by pread; one that was cut short, changed or removed since it was opened is named.
#
# No memory map: cold, at random places, the kernel's read-ahead made each read 8 to 14 times slower than pread, and
# a file that was cut short ended the process with SIGBUS and no word (2026-11-21).


MAX_OPEN_FILES = 256
"""Files kept open by a reader; of more, the one opened last is closed, and opened again when it is read again."""


@dataclass(frozen=True)
class Shard:
    """A file with a run of tokens in it."""

    path: Path
    tokens: int
    first_byte: int = 0
    """Offset of its first token; a header stands before it."""


class _OpenFile:
    """A descriptor, closed with its last reference: another thread may be reading the file that this one puts away."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "descriptor"):
            close(self.descriptor)  # at the end of Python the module `os` may be gone


def _state(status: os.stat_result) -> tuple[int, int]:
    """Size and time of modification in ns: a write changes them."""
    return status.st_size, status.st_mtime_ns


FORMAT = 1
INDEX_NAME = "index.json"
MAX_INDEX_NBYTES = 1 << 28
DOCUMENTS_NAME = "documents.bin"
DOCUMENT_NBYTES = 8
STORE_DTYPES = ("uint8", "uint16", "uint32")
MAX_VOCAB_SIZE = 1 << 32
"""As many as the widest of the dtypes has values."""
_PIECE = 1 << 20


class ShardEntry(Struct):
    """A shard in the index."""

    name: FileName
    tokens: Natural


class StoreIndex(Struct):
    """The content of index.json."""

    format: int
    dtype: Annotated[str, one_of(*STORE_DTYPES)]
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_VOCAB_SIZE)]
    tokenizer: str | None
    shards: list[ShardEntry]
    documents: FileName | None
    num_documents: Natural


class TokenStore:
    """A row of tokens over the shards it lies in, read by number.

    Holds no token in memory, and a few open files. May be read by several threads, and pickled. The size and the time
    of modification of each file are noted at the start and compared after each read: tokens are returned only if the
    file is as it was at the start.

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
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self.tokens = self._starts[-1]
        """Tokens of all shards."""
        self.sources: Sequence[Path] = ()
        """The files behind the documents, in order; empty where nobody knows."""
        self._read_documents = documents
        self._states = [_state(os.stat(shard.path)) for shard in self.shards]
        self._files: dict[int, _OpenFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "TokenStore":
        """The store in a folder.

        Raises:
            FileNotFoundError: the folder has no index, or a file that the index names is not there.
            ValueError: the index is of another format or cannot be understood, or a file has another size than it says.
        """
        folder = Path(folder)
        index = _read_index(folder / INDEX_NAME)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        shards = [Shard(folder / entry.name, entry.tokens) for entry in index.shards]
        for shard in shards:
            _require_size(shard.path, shard.tokens * dtype.itemsize, f"{shard.tokens} tokens of {dtype.name}")
        tokens = sum(shard.tokens for shard in shards)
        documents = None
        if index.documents is not None:
            file, num_documents = folder / index.documents, index.num_documents
            _require_size(file, num_documents * DOCUMENT_NBYTES, f"{num_documents} documents")
            documents = partial(_read_documents, file, tokens, num_documents)
        return cls(shards, dtype, vocab_size=index.vocab_size, tokenizer=index.tokenizer, documents=documents)

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
        tokens = np.empty(int(lengths.sum()), dtype=self.dtype)
        read: dict[int, int] = {}
        filled = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            shard, offset = self._place(start)
            end = filled + length
            while filled < end:
                count = min(end - filled, self.shards[shard].tokens - offset)
                if count:
                    self._fill(tokens[filled : filled + count], shard, offset)
                    read[shard] = offset
                filled, shard, offset = filled + count, shard + 1, 0
        for shard, offset in read.items():
            self._require_unchanged(shard, offset)
        return tokens

    def where(self, position: int) -> str:
        """The file of token `position` of the row, and its number in it, as a message says it."""
        shard, offset = self._place(position)
        return f"{self.shards[shard].path}, token {offset}"

    def origin(self, position: int) -> str:
        """The document of token `position` of the row, and its number in it: by the file that was read where each is
        one document, else by the document's number."""
        documents = self.documents
        if documents is None:
            return self.where(position)
        number = int(np.searchsorted(documents, position, side="right")) - 1
        shard, _ = self._place(position)
        one_each = len(self.sources) == len(documents)
        name = self.sources[number] if one_each else f"document {number} of {self.shards[shard].path.parent}"
        return f"{name}, token {position - documents[number]}"

    def _place(self, position: int) -> tuple[int, int]:
        """The number of the shard of a token, and the token's number in it."""
        shard = bisect_right(self._starts, position, hi=len(self.shards)) - 1
        return shard, position - self._starts[shard]

    def _fill(self, tokens: np.ndarray, shard: int, offset: int) -> None:
        """Read as many tokens as there is room for, from token `offset` of a shard on."""
        file, into = self._file(shard, offset), tokens.view(np.uint8).data
        position = self.shards[shard].first_byte + offset * self.dtype.itemsize
        filled = 0
        while filled < len(into):
            try:
                count = os.preadv(file.descriptor, [into[filled:]], position + filled)
            except OSError as error:
                raise OSError(
                    f"{self.shards[shard].path} cannot be read at token {offset} ({error.strerror}); "
                    "check its disk or network"
                ) from error
            if count == 0:
                self._require_unchanged(shard, offset)
                raise OSError(f"{self.shards[shard].path} has no bytes at token {offset}, although its size says so")
            filled += count

    def _file(self, shard: int, offset: int) -> "_OpenFile":
        file = self._files.get(shard)
        if file is None:
            path, old = self.shards[shard].path, self._states[shard]
            try:
                file = _OpenFile(path)
            except FileNotFoundError:
                raise OSError(
                    f"{path} is gone; it had {old[0]} bytes when it was opened, and the run needs its token "
                    f"{offset}: keep the files of a run where they are"
                ) from None
            while len(self._files) >= MAX_OPEN_FILES:
                with suppress(KeyError):  # another thread was faster
                    self._files.popitem()  # closed by the last thread that reads it
            self._files[shard] = file
        return file

    def _require_unchanged(self, shard: int, offset: int) -> None:
        """Compare a file with its first state. An OSError says its size, then and now, and the token to read."""
        file = self._file(shard, offset)  # kept by name: another thread may put it away before fstat
        old, new = self._states[shard], _state(os.fstat(file.descriptor))
        if old == new:
            return
        what = "was changed" if new[0] == old[0] else "was cut short" if new[0] < old[0] else "has grown"
        then, now = (datetime.fromtimestamp(state[1] / 1e9).isoformat(" ", "milliseconds") for state in (old, new))
        raise OSError(
            f"{self.shards[shard].path} {what} since it was opened: it had {old[0]} bytes, last written "
            f"{then}, and has {new[0]} bytes, last written {now}; the run needs its token "
            f"{offset}. Do not change the files of a run: put it back, or give the new data another name"
        )


def write_index(
    folder: str | os.PathLike[str],
    *,
    dtype: str,
    shards: Sequence[tuple[str, int]],
    vocab_size: int,
    tokenizer: str | None = None,
    documents: np.ndarray | None = None,
) -> None:
    """Make a store of the shards already in a folder: write their index, documents first.

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
    content = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "shards": [{"name": name, "tokens": int(tokens)} for name, tokens in shards],
        "documents": None if documents is None else DOCUMENTS_NAME,
        "num_documents": 0 if documents is None else len(documents),
    }
    _index_of(content, folder / INDEX_NAME)
    for name, tokens in shards:
        _require_size(folder / name, tokens * np.dtype(dtype).itemsize, f"{tokens} tokens of {dtype}")
    if documents is not None:
        _require_rising(documents, sum(tokens for _, tokens in shards), folder / DOCUMENTS_NAME)
        pieces = range(0, len(documents), _PIECE)
        with whole(folder / DOCUMENTS_NAME, lasting=True) as file:
            file.writelines(documents[at : at + _PIECE].astype("<u8").tobytes() for at in pieces)
    with whole(folder / INDEX_NAME, lasting=True) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _read_index(file: Path) -> StoreIndex:
    try:
        content = read_json(file, Any, max_nbytes=MAX_INDEX_NBYTES)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file.parent} has no {INDEX_NAME}; a store of tokens has one, written last: this one is not complete"
        ) from None
    except UntrustedFileError as error:
        raise ValueError(f"{file} is no index of a store ({error}); make the store again, or copy it again") from error
    return _index_of(content, file)


def _index_of(content: Any, file: Path) -> StoreIndex:
    """The index with this content, for the file of this name. A ValueError where a field is wrong."""
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"{file} does not describe a store of tokens: it has no format")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{file} has format {shown(content['format'])}, and this zerotrain reads format {FORMAT}; make the "
            "store anew, or read it with the zerotrain that wrote it"
        )
    try:
        index: StoreIndex = require_kind(content, StoreIndex)
    except UntrustedFileError as error:
        raise ValueError(f"{file}: {error}; make the store again") from None
    names = [INDEX_NAME, index.documents, *(entry.name for entry in index.shards)]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: shards: a file is named twice; make the store again")
    if index.num_documents and index.documents is None:
        raise ValueError(f"{file}: num_documents: got {index.num_documents} without documents; make the store again")
    return index


def _require_size(file: Path, nbytes: int, what: str) -> None:
    try:
        actual_nbytes = file.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} is missing, and {INDEX_NAME} beside it names it; copy the store again"
        ) from None
    if actual_nbytes != nbytes:
        raise ValueError(
            f"{file} has {actual_nbytes} bytes, but {INDEX_NAME} beside it says {nbytes} ({what}); make the store "
            "again, or copy it again"
        )


def _read_documents(file: Path, tokens: int, num_documents: int) -> np.ndarray:
    _require_size(file, num_documents * DOCUMENT_NBYTES, f"{num_documents} documents")
    documents = np.fromfile(file, dtype="<u8")
    _require_rising(documents, tokens, file)
    return documents.view("<i8")


def _require_rising(documents: np.ndarray, tokens: int, file: Path) -> None:
    """Refuse all but starts of documents in a row of so many tokens."""
    rising = len(documents) > 0 and documents[0] == 0 and documents[-1] <= tokens
    for at in range(0, len(documents) if rising else 0, _PIECE):
        piece = documents[at : at + _PIECE + 1]
        rising = rising and bool((piece[1:] >= piece[:-1]).all())
    if not rising:
        raise ValueError(
            f"{file} does not hold the starts of documents in {tokens} tokens: they must rise from 0; make the store "
            "again, or copy it again"
        )
