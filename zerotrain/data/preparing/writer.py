"""A store as it is written: what the disk has is noted every few seconds, so that one that was ended goes on there."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerotrain.data.store.store import INDEX_NAME, write_index
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import Natural, UntrustedFileError, read_json, require_kind

SHARD_TOKENS = 1 << 27
"""Tokens of every shard but the last: borders of shards do not depend on interruptions of the writing."""
NOTE_S = 5.0
"""Seconds of work that are lost at most where the process is killed."""
NOTES_NAME = "preparing.json"
MAX_NOTES_NBYTES = 1 << 16
STARTS_NAME = "starts.part"
"""File with the starts of documents, until the index is written."""


@dataclass
class Done:
    """Contents of an unfinished store on the disk, and the place in the sources where writing resumes."""

    made_of: str
    """A hash of what it is made of."""
    file: Natural = 0
    """The number of the source."""
    offset: Natural = 0
    """In the source, see `text_files.read_pieces`."""
    tokens: Natural = 0
    documents: Natural = 0
    begins: bool = False
    """The next token is the first of a document."""
    nulls: Natural = 0
    """Rows that were left out, since their text is null."""


def _hash_of(done: Done) -> str:
    return hashlib.sha256(json.dumps(asdict(done), sort_keys=True).encode()).hexdigest()[:16]


class StoreWriter:
    """Writes the tokens of documents to a folder, after what an earlier writer has left there of the same.

    Args:
        folder: is there, and nobody else writes to it.
        dtype: of the tokens.
        made_of: a hash of what the store is made of; of what was made of something else nothing is kept.

    Raises:
        OSError: the folder cannot be written; `filename` names something in it.
    """

    def __init__(self, folder: Path, dtype: np.dtype, made_of: str) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._noted_s = time.monotonic()
        self._shard: BinaryIO | None = None
        with self._naming():
            self.done = self._left(made_of) or Done(made_of)
            self._cut_back()
            self._starts = (folder / STARTS_NAME).open("ab")

    def start_document(self) -> None:
        """The next token written begins a document; a document without tokens is not counted."""
        self.done.begins = True

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, (num_tokens,)."""
        with self._naming():
            if self.done.begins and len(tokens):
                self._starts.write(np.array([self.done.tokens], "<u8").tobytes())
                self.done.documents, self.done.begins = self.done.documents + 1, False
            while len(tokens):
                room = SHARD_TOKENS - self.done.tokens % SHARD_TOKENS
                if self._shard is None:
                    self._shard = (self._folder / _name(self.done.tokens // SHARD_TOKENS)).open("ab")
                self._shard.write(tokens[:room].astype(self._dtype, copy=False).tobytes())
                self.done.tokens += min(room, len(tokens))
                tokens = tokens[room:]
                if self.done.tokens % SHARD_TOKENS == 0:
                    self._close_shard()

    def note(self, file: int, offset: int, *, now: bool = False) -> None:
        """Note that all before this place of the sources is written, and sync it to the disk: if `NOTE_S` have passed,
        or now."""
        if not now and time.monotonic() < self._noted_s + NOTE_S:
            return
        with self._naming():
            for written in filter(None, (self._shard, self._starts)):
                written.flush()
                os.fsync(written.fileno())
            self.done.file, self.done.offset = file, offset
            noted = asdict(self.done) | {"hash": _hash_of(self.done)}
            with whole(self._folder / NOTES_NAME, lasting=True) as notes:
                notes.write(json.dumps(noted).encode())
        self._noted_s = time.monotonic()

    def complete(self, *, vocab_size: int, tokenizer: str | None, with_documents: bool) -> None:
        """Make the folder a store. The notes stay until `forget_notes`."""
        with self._naming():
            self.close()
            starts = None
            if with_documents and self.done.documents:
                starts = np.memmap(self._folder / STARTS_NAME, "<u8", "r")
            names = [_name(number) for number in range(-(-self.done.tokens // SHARD_TOKENS))]
            shards = [(name, (self._folder / name).stat().st_size // self._dtype.itemsize) for name in names]
            write_index(
                self._folder,
                dtype=self._dtype.name,
                shards=shards,
                vocab_size=vocab_size,
                tokenizer=tokenizer,
                documents=starts,
            )

    def close(self) -> None:
        """Close the files."""
        with self._naming():
            self._close_shard()
            self._starts.close()

    def _close_shard(self) -> None:
        if self._shard is not None:
            closing, self._shard = self._shard, None
            with closing:
                closing.flush()
                os.fsync(closing.fileno())

    def _left(self, made_of: str) -> Done | None:
        """The notes of an earlier writer; None if writing cannot resume there."""
        try:
            notes = read_json(self._folder / NOTES_NAME, dict[str, Any], max_nbytes=MAX_NOTES_NBYTES)
            done: Done = require_kind(notes, Done)
            if notes.get("hash") != _hash_of(done):
                return None
            last, rest = divmod(done.tokens, SHARD_TOKENS)
            needed = {_name(number): SHARD_TOKENS * self._dtype.itemsize for number in range(last)}
            needed |= {_name(last): rest * self._dtype.itemsize} if rest else {}
            needed[STARTS_NAME] = done.documents * 8
            is_there = all((self._folder / name).stat().st_size >= nbytes for name, nbytes in needed.items())
            return done if is_there and done.made_of == made_of else None
        except (FileNotFoundError, UntrustedFileError):
            return None

    def _cut_back(self) -> None:
        """Remove what was not noted."""
        for cut_off in self._folder.glob("*.tmp"):
            cut_off.unlink()
        keep = self.done.tokens
        if keep == 0 and self.done.file == 0 == self.done.offset:
            remove_store(self._folder)
        for shard in self._folder.glob("*.bin"):
            number = int(shard.stem) if shard.stem.isdigit() else -1
            if number * SHARD_TOKENS >= keep or number < 0:
                shard.unlink()
            else:
                os.truncate(shard, min(SHARD_TOKENS, keep - number * SHARD_TOKENS) * self._dtype.itemsize)
        if self.done.documents:
            os.truncate(self._folder / STARTS_NAME, self.done.documents * 8)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Inside, an error of the disk says where: the system names no file that is open already."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(self._folder)
            raise


def is_begun(folder: Path) -> bool:
    """Whether a store was begun in a folder and not completed."""
    return (folder / NOTES_NAME).exists()


def forget_notes(folder: Path) -> None:
    """Remove what is of no use to a store that is complete."""
    for name in (STARTS_NAME, NOTES_NAME):
        (folder / name).unlink(missing_ok=True)


def remove_store(folder: Path) -> None:
    """Remove the files of a store, the index first, and of one that was begun."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for pattern in (NOTES_NAME, STARTS_NAME, "*.bin", "*.tmp"):
        for file in folder.glob(pattern):
            file.unlink()


def _name(number: int) -> str:
    return f"{number:06}.bin"
