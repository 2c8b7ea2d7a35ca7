"""Stores of tokens made of text once and kept: whole or not there, sealed with hashes, made anew where they do not fit.

In a store's folder lies its seal, `seal.json`: the size and the hash of the store's files, the hash of its sources, and
a stamp of the files the hashes were taken of. While the stamp fits, nothing has been written to them since, and they
are not read again: the ranks of a run find it as the process has left it that started them. No program sets a file's
time of change, which is part of the stamp; sizes and times of modification can be the same for other text.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import InitVar, asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerotrain.data.store import INDEX_NAME, Shard, TokenStore, write_index
from zerotrain.data.text_files import Sources, TextPiece, find_sources, is_plain, read_pieces
from zerotrain.data.tokenizer import PIECE_NBYTES, Cut, DocumentEnd, ExactPlace, TextTokenizer, cut_anywhere
from zerotrain.files.lock import can_lock, holder, lock, note_holder, open_lock, read_note, whole
from zerotrain.files.untrusted import Natural, duration, parse_json, read_regular

# One process at a time fills a folder. The others wait as long as it takes, and name the process that they wait for.


LOCK_NAME = "lock"
REMINDER_S = 10.0
_POLL_S = 0.1


@contextmanager
def sole_writer(folder: Path, *, private: bool) -> Iterator[None]:
    """Make a folder. Inside, no other process of this machine is inside for the same folder.

    Args:
        private: the folder is made for the user alone.

    Raises:
        OSError: the folder cannot be made or written.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        path = folder / LOCK_NAME
        with open_lock(path) as file:
            _wait(file, folder)
            if not path.exists() or not os.path.samefile(file.fileno(), path):
                continue  # the holder has removed the folder as abandoned
            with _naming_folder(folder):
                note_holder(file)
            yield
            return


@contextmanager
def _naming_folder(folder: Path) -> Iterator[None]:
    """Inside, an error of the disk names a folder: the system names no file that is open already."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise


def _wait(file: BinaryIO, folder: Path) -> None:
    started_s, next_s = time.monotonic(), REMINDER_S
    while True:
        try:
            problem = lock(file)
            break
        except BlockingIOError:
            waited_s = time.monotonic() - started_s
            if waited_s >= next_s:
                next_s += REMINDER_S
                print(
                    f"waits for {holder(folder / LOCK_NAME)}, which prepares {folder} ({waited_s:.0f} s)",
                    file=sys.stderr,
                )
            time.sleep(_POLL_S)
    if problem is not None:
        print(f"warning: {folder} cannot be locked ({problem}); prepare nothing else there", file=sys.stderr)


# A store as it is written: shard by shard. A shard gets its name once all of it is on the disk, and then a note, which
# says where in the sources its tokens end: an ended process is continued behind the last shard with a note.


SHARD_TOKENS = 1 << 25
"""Tokens of every shard but the last: borders of shards do not depend on interruptions of the writing. As many are
tokenised again at most where the process is killed, 20 s of work at 1.6 million tokens a second."""
NOTES = "[0-9]*.note"
MAX_JSON_NBYTES = 1 << 16


@dataclass(frozen=True)
class SourcePlace:
    """A place in the sources from which they can be read on, and the contents of the store up to there."""

    file: Natural = 0
    """The number of the source."""
    offset: Natural = 0
    """In the source, see `text_files.read_pieces`."""
    nbytes_read: Natural = 0
    """Bytes of all sources before it, as they lie on the disk."""
    tokens: Natural = 0
    begins: bool = False
    """The next token is the first of a document."""
    nulls: Natural = 0
    """Rows without a text, left out."""


class StoreWriter:
    """Writes the tokens of documents to a folder, behind the finished shards of an earlier writer.

    Args:
        folder: is there, and nobody else writes to it.
        dtype: of the tokens.
        made_of: a hash of the sources and the recipe; shards with another hash are removed.

    Raises:
        OSError: the folder cannot be written; `filename` names something in it.
    """

    def __init__(self, folder: Path, dtype: np.dtype, made_of: str) -> None:
        self._folder, self._dtype, self._made_of = folder, np.dtype(dtype).newbyteorder("<"), made_of
        self.resumed_at, self._num_finished = SourcePlace(), 0
        with _naming_folder(folder):
            # Up to the first shard that is not there, or not as it was noted.
            with suppress(FileNotFoundError, ValueError):
                while True:
                    place, _ = self._read_note(self._num_finished)
                    nbytes = (folder / f"{self._num_finished:06}.bin").stat().st_size
                    if nbytes != SHARD_TOKENS * self._dtype.itemsize:
                        break
                    self.resumed_at, self._num_finished = place, self._num_finished + 1
            remove_store(folder, num_finished=self._num_finished)
        self._place = place = self.resumed_at
        self.tokens, self.nulls, self._begins = place.tokens, place.nulls, place.begins
        self._shard, self._starts = np.empty(SHARD_TOKENS, self._dtype), list[int]()

    def write(self, tokens: np.ndarray, *, starts: bool = False) -> None:
        """Append tokens, (num_tokens,). Tokens in finished shards, behind the place where writing was resumed, are
        passed over.

        Args:
            starts: a document starts with them, or with the next ones if there are none.
        """
        self._begins |= starts
        if self._begins and len(tokens):
            self._begins = False
            if self.tokens >= self._num_finished * SHARD_TOKENS:
                self._starts.append(self.tokens)
        while len(tokens):
            at = self.tokens - self._num_finished * SHARD_TOKENS
            count = min(len(tokens), SHARD_TOKENS - at if at >= 0 else -at)
            if at >= 0:
                self._shard[at : at + count] = tokens[:count]
            self.tokens, tokens = self.tokens + count, tokens[count:]
            if at + count == SHARD_TOKENS:
                self._finish_shard(SHARD_TOKENS)

    def note(self, file: int, offset: int, nbytes_read: int) -> None:
        """Note a place of the sources before which all is written: writing is resumed there at the earliest, once the
        shard of its last token is finished."""
        self._place = SourcePlace(file, offset, nbytes_read, self.tokens, self._begins, self.nulls)

    def complete(self, *, vocab_size: int, tokenizer: str | None) -> None:
        """Make the folder a store. The notes stay for the caller to remove."""
        num_left = self.tokens - self._num_finished * SHARD_TOKENS
        if num_left > 0:
            self._finish_shard(num_left)
        starts = np.concatenate([self._read_note(number)[1] for number in range(self._num_finished)])
        sizes = [min(SHARD_TOKENS, self.tokens - first) for first in range(0, self.tokens, SHARD_TOKENS)]
        with _naming_folder(self._folder):
            write_index(
                self._folder,
                dtype=self._dtype.name,
                shards=[(f"{number:06}.bin", tokens) for number, tokens in enumerate(sizes)],
                vocab_size=vocab_size,
                tokenizer=tokenizer,
                documents=starts if len(starts) > 1 else None,
            )

    def _finish_shard(self, num_tokens: int) -> None:
        place = json.dumps(asdict(self._place)).encode()
        note = place + b"\n" + np.array(self._starts, "<u8").tobytes()
        parts: dict[str, bytes | memoryview] = {
            "bin": self._shard[:num_tokens].data,
            "note": self._digest(note) + b"\n" + note,
        }
        with _naming_folder(self._folder):
            for suffix, part in parts.items():
                with whole(self._folder / f"{self._num_finished:06}.{suffix}", lasting=True) as file:
                    file.write(part)
        self._num_finished, self._starts = self._num_finished + 1, []

    def _read_note(self, number: int) -> tuple[SourcePlace, np.ndarray]:
        """(the noted place of a shard, the starts of documents in it). A ValueError if the note is damaged, or of
        another text."""
        path, max_nbytes = self._folder / f"{number:06}.note", MAX_JSON_NBYTES + 8 * SHARD_TOKENS
        digest, _, note = read_regular(path, max_nbytes=max_nbytes).partition(b"\n")
        if digest != self._digest(note):
            raise ValueError(f"{path} is damaged, or of another text")
        place, _, starts = note.partition(b"\n")
        return parse_json(place, SourcePlace), np.frombuffer(starts, "<u8")

    def _digest(self, note: bytes) -> bytes:
        return hashlib.sha256(self._made_of.encode() + note).hexdigest().encode()


def remove_store(folder: Path, *, num_finished: int = 0) -> None:
    """Remove the files of a store, seal and index first, but for so many finished shards and their notes."""
    finished = {f"{number:06}" for number in range(num_finished)}
    for pattern in (SEAL_NAME, INDEX_NAME, NOTES, "*.bin", "*.tmp"):
        for file in folder.glob(pattern):
            if file.stem not in finished:
                file.unlink()


SEAL_NAME = "seal.json"
HASHED_NBYTES = 1 << 24
"""Hashed by one thread at a time: 1.8 GB/s each, where the CPU has instructions for SHA-256."""
ABANDONED_S = 7 * 86400.0
"""Unfinished stores are removed once nobody has gone on with them for so long."""
_STORE_NAME = re.compile("(text|tokens)(-[0-9a-f]{16}){3}")
"""`text-2026-11-23` does not match: it may be a folder of the user's own in the folder named as the cache."""
_TICK_S = 0.05
"""Longer than the steps of a file system's clock. A write one step later sets another time of change."""


@dataclass(frozen=True)
class Seal:
    """The state of a store and its sources after they were read whole."""

    nbytes: Natural
    sha256: str
    """Hash of the store's files."""
    sources_sha256: str
    stamp: str
    """Hash of the sizes, times and places on disk of the store's files and its sources."""
    recipe: str
    """A hash of how the sources were made into tokens."""


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for files made of the data; it need not be there yet."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotrain"


def kept_store(
    folder: Path, sources: Sequence[Path], recipe: str, write: Callable[[Path, str], None], *, private: bool = True
) -> Path:
    """`folder`, with the store that `write` makes of some files, made now if it is not there or not what was made of
    them. One process works, others wait for it; one that was ended is gone on with.

    Args:
        recipe: a hash of how `write` makes tokens of the files.
        write: gets the folder and a hash of the files and their state.
        private: only the user may read it: others with access to the cache may have none to the sources.

    Raises:
        OSError: it cannot be written, or a source not be read.
        ValueError: a source was written to, replaced or removed meanwhile.
        Exception: what `write` raises.
    """
    if misfit(folder, sources, recipe) is None:
        return folder
    with sole_writer(folder, private=private):
        reason = misfit(folder, sources, recipe)
        if reason is None:  # another process has made it meanwhile
            return folder
        if (folder / SEAL_NAME).exists() or ((folder / INDEX_NAME).exists() and not [*folder.glob(NOTES)]):
            print(f"{folder} is made anew: {reason}", file=sys.stderr, flush=True)
            remove_store(folder)
        marks = _marks(sources)  # before they are read
        try:
            sources_sha256 = sha256_of(sources)
            write(folder, f"{sources_sha256} {_stamp(marks)}")
        except Exception:
            _require_unchanged(sources, marks, folder)  # half a line of JSON is not broken, but still being written
            raise
        store_files = _store_files(folder)
        nbytes, stamp = sum(file.stat().st_size for file in store_files), _stamp(_marks(store_files) + marks)
        seal = Seal(nbytes, sha256_of(store_files), sources_sha256, stamp, recipe)
        _require_unchanged(sources, marks, folder)
        _write_seal(folder, seal)
        for note in folder.glob(NOTES):
            note.unlink()
    return folder


def remove_abandoned(cache: Path, *, superseded: str, keep: str) -> None:
    """Remove stores that were begun in a cache and that nobody will complete: of files that have changed since, and
    those of long ago.

    Args:
        superseded: the beginning of the names of stores of the same paths.
        keep: the name of the one that is of use.
    """
    for folder in cache.iterdir() if cache.is_dir() else ():
        if folder.name == keep or not _STORE_NAME.fullmatch(folder.name) or (folder / SEAL_NAME).exists():
            continue
        with suppress(OSError), open_lock(folder / LOCK_NAME, make=False) as file:  # or it is another user's
            is_old = time.time() - folder.stat().st_mtime > ABANDONED_S
            if (is_old or folder.name.startswith(superseded)) and can_lock(file):
                shutil.rmtree(folder)


def sha256_of(files: Sequence[Path]) -> str:
    """Hash the contents of some files: the SHA-256 of those of their pieces, on all cores."""

    def hash_piece(piece: tuple[Path, int]) -> bytes:
        path, start = piece
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return hashlib.sha256(file.read(HASHED_NBYTES)).digest()

    pieces = ((file, start) for file in files for start in range(0, max(1, file.stat().st_size), HASHED_NBYTES))
    digest = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for digest_of_piece in pool.map(hash_piece, pieces):
            digest.update(digest_of_piece)
    return digest.hexdigest()


def misfit(folder: Path, sources: Sequence[Path], recipe: str) -> str | None:
    """Why a store is not to be used; None where it is."""
    seal, store_files = read_note(folder / SEAL_NAME, Seal), _store_files(folder)
    if seal is None:
        is_there = (folder / SEAL_NAME).exists()
        return f"what it holds cannot be read from {SEAL_NAME}" if is_there else "nothing in it says what it holds"
    if seal.recipe != recipe:
        return "it was made with other settings"
    if not store_files[-1].exists():
        return f"it has no {INDEX_NAME}"
    stamp = _stamp(_marks([*store_files, *sources]))
    if stamp == seal.stamp:
        return None
    if (nbytes := sum(file.stat().st_size for file in store_files)) != seal.nbytes:
        return f"it has {nbytes} bytes, and had {seal.nbytes} when it was made"
    if sha256_of(store_files) != seal.sha256:
        return "its bytes are not those that were written"
    if sha256_of(sources) != seal.sources_sha256:
        return "the text it was made of has changed"
    with suppress(OSError):  # of another user, or in a folder that is only read: hashed again the next time
        _write_seal(folder, replace(seal, stamp=stamp))
    return None


def _store_files(folder: Path) -> list[Path]:
    """The files of a store, the index last."""
    return [*sorted(folder.glob("*.bin")), folder / INDEX_NAME]


def _marks(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """A mark of each file, which differs once anything has been written to the file from now on."""
    states = [file.stat() for file in files]
    if any(abs(time.time() - state.st_ctime) < _TICK_S for state in states):
        time.sleep(_TICK_S)
        states = [file.stat() for file in files]
    return [_mark(state) for state in states]


def _mark(state: os.stat_result) -> tuple[int, ...]:
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _stamp(marks: list[tuple[int, ...]]) -> str:
    return hashlib.sha256(repr(marks).encode()).hexdigest()


def _require_unchanged(sources: Sequence[Path], marks: list[tuple[int, ...]], folder: Path) -> None:
    """Remove the store, with a ValueError, if a source is no longer as it was before it was read."""
    for source, mark in zip(sources, marks, strict=True):
        if not source.exists() or _mark(source.stat()) != mark:
            remove_store(folder)
            raise ValueError(
                f"data.path: {source} was written to while it was read; start again once nothing writes to it, or give "
                "a copy of it"
            )


def _write_seal(folder: Path, seal: Seal) -> None:
    with whole(folder / SEAL_NAME, lasting=True) as file:
        file.write(json.dumps(asdict(seal)).encode())


# How far a long piece of work has come, on stderr: one changing line on a terminal, else a line each ten seconds.


QUIET_S = 2.0
"""Shorter work says nothing."""
LINE_S = 10.0


class Progress:
    """Tells of the preparing of text: part done, MB/s, time left.

    Args:
        nbytes: to read in all.
        nbytes_read: those that were read before.
    """

    def __init__(self, nbytes: int, nbytes_read: int) -> None:
        from rich import console, progress  # not of those that every run needs

        terminal = console.Console(stderr=True)
        self._is_terminal = terminal.is_terminal and not terminal.is_dumb_terminal
        self._display = progress.Progress(
            progress.TextColumn("{task.description}"),
            console=terminal,
            refresh_per_second=2,
            disable=not self._is_terminal,
        )
        self._task = self._display.add_task("", total=nbytes, completed=nbytes_read)
        self._started_s = time.monotonic()
        self._next_s = self._started_s + (QUIET_S if self._is_terminal else LINE_S)
        self._line = ""
        if nbytes_read:
            print(f"preparing: goes on at {_mb(nbytes_read)} of {_mb(nbytes)} MB", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._display.stop()
        if self._line and not self._is_terminal and kind is None:
            print(self._line, file=sys.stderr, flush=True)

    def advance(self, nbytes: int, tokens: int) -> None:
        """Note how many bytes are read, and how many tokens made."""
        self._display.update(self._task, completed=nbytes)
        now_s, task = time.monotonic(), self._display.tasks[0]
        if now_s < self._started_s + QUIET_S:
            return
        self._line = (
            f"preparing: {_mb(nbytes)} of {_mb(task.total or 0)} MB, {tokens:,} tokens, "
            f"{(task.speed or 0) / 1e6:.1f} MB/s, {duration(task.time_remaining or 0)} left"
        )
        self._display.update(self._task, description=self._line)
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_S
            if self._is_terminal:
                self._display.start()
            else:
                print(self._line, file=sys.stderr, flush=True)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"


# Making a store of tokens of text files: read, cut, tokenised on all cores, written shard by shard.


VERSION = 2
"""Counted up when the same files come to be other tokens."""
NUM_BYTE_VALUES = 256
BATCH_NBYTES = 1 << 20
"""Tokenised together: a tokenizer takes about 150 bytes of memory for each."""
_BATCHES_UNDER_WAY = 2
_MAX_PIECES = 4096
_WARNED_NBYTES = 1 << 24


@dataclass
class Recipe:
    """How files become a row of tokens.

    Args:
        tokenizer: None for bytes.
        document_end: the mark between documents, as `DocumentEnd` takes it.
        text_field: of a .jsonl object, or column of a .parquet file.

    Raises:
        ValueError: there is no such end of a document, or the tokenizer has none.
    """

    sources: Sources
    tokenizer: TextTokenizer | None
    document_end: InitVar[str | None] = None
    text_field: str = "text"

    def __post_init__(self, document_end: str | None) -> None:
        self.ending = DocumentEnd(self.tokenizer, document_end)
        """The mark between documents."""
        self.dtype = np.dtype(np.uint8) if self.tokenizer is None else self.tokenizer.token_dtype
        """Dtype of a token."""
        self.vocab_size = NUM_BYTE_VALUES if self.tokenizer is None else self.tokenizer.vocab_size
        """Tokens are below this."""

    @property
    def fingerprint(self) -> str:
        """Differs where the same files come to be other tokens."""
        tokenizer = None if self.tokenizer is None else self.tokenizer.fingerprint()
        return _hash(repr((VERSION, tokenizer, *self.facts())))

    def facts(self) -> tuple[Any, ...]:
        """All but the tokenizer on which the tokens of a text depend."""
        return self.ending.name, self.text_field

    def pieces(self, file: int, offset: int) -> Iterator[tuple[int, TextPiece]]:
        """The pieces of all documents from a place on, each with the number of its file."""
        for number in range(file, len(self.sources.files)):
            for piece in self.pieces_of(self.sources.files[number], offset if number == file else 0):
                yield number, piece

    def pieces_of(self, path: Path, start: int) -> Iterator[TextPiece]:
        """The pieces of the documents of a file from a place on."""
        cut: Cut = cut_anywhere if self.tokenizer is None else ExactPlace(self.tokenizer.tokens_of)
        return read_pieces(path, field=self.text_field, start=start, cut=cut)

    def tokens_of(self, pieces: list[TextPiece]) -> list[np.ndarray]:
        """The tokens of each piece, with the marks between documents."""
        adds_newline = self.ending.name == "newline"
        texts = [
            piece.text + b"\n" if adds_newline and piece.ends and not piece.text.endswith(b"\n") else piece.text
            for piece in pieces
        ]
        if self.tokenizer is None:
            return [np.frombuffer(text, np.uint8) for text in texts]
        encoded = self.tokenizer.encode_batch([text.decode(errors="replace") for text in texts])
        marks = [self.ending.marks(starts=piece.starts, ends=piece.ends) for piece in pieces]
        return [
            np.concatenate([prefix, tokens, suffix]) for tokens, (prefix, suffix) in zip(encoded, marks, strict=True)
        ]


def write_store(recipe: Recipe, folder: Path, made_of: str) -> None:
    """Write the tokens of a recipe's files to a folder, going on where an earlier call ended.

    Args:
        folder: is there, and nobody else writes to it.
        made_of: a hash of the contents of the files.

    Raises:
        OSError: the folder cannot be written (`filename` names something in it), or a file not be read.
        ValueError: a file is broken or has no text where the recipe says.
        ImportError: a package that reads a kind of file is not installed.
    """
    sources = recipe.sources
    if (len(sources.files) > 1 or sources.leaves_data) and not sources.is_default:
        print(sources, file=sys.stderr, flush=True)
    first_bytes = [0, *accumulate(file.stat().st_size for file in sources.files)]
    writer = StoreWriter(folder, recipe.dtype, f"{recipe.fingerprint} {made_of}")
    resumed_at = writer.resumed_at
    with Progress(first_bytes[-1], resumed_at.nbytes_read) as progress:
        for batch, encoded in _encode_batches(recipe, resumed_at.file, resumed_at.offset):
            for (_, piece), tokens in zip(batch, encoded, strict=True):
                writer.nulls += piece.is_null
                writer.write(tokens, starts=piece.starts)
            number, last_piece = batch[-1]
            nbytes_read = first_bytes[number] + last_piece.reached
            if last_piece.resume_at is not None or last_piece.ends:
                at_end = last_piece.resume_at is None
                writer.note(number + at_end, last_piece.resume_at or 0, nbytes_read)
            progress.advance(nbytes_read, writer.tokens)
    if writer.nulls:
        print(f"{sources.path}: leaves out {writer.nulls:,} rows whose text is null", file=sys.stderr, flush=True)
    if not writer.tokens:
        raise ValueError(f"{sources.path} holds no text; give a file, folder or pattern with at least one document")
    tokenizer = None if recipe.tokenizer is None else recipe.tokenizer.fingerprint()
    writer.complete(vocab_size=recipe.vocab_size, tokenizer=tokenizer)


def _encode_batches(
    recipe: Recipe, file: int, offset: int
) -> Iterator[tuple[list[tuple[int, TextPiece]], list[np.ndarray]]]:
    """Batches of pieces with their tokens, in order; the next ones are tokenised meanwhile."""
    waiting: deque[tuple[list[tuple[int, TextPiece]], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(_BATCHES_UNDER_WAY) as pool:
        for batch in _group_pieces(recipe, file, offset):
            waiting.append((batch, pool.submit(recipe.tokens_of, [piece for _, piece in batch])))
            if len(waiting) > _BATCHES_UNDER_WAY:
                pieces, future = waiting.popleft()
                yield pieces, future.result()
        for pieces, future in waiting:
            yield pieces, future.result()


def _group_pieces(recipe: Recipe, file: int, offset: int) -> Iterator[list[tuple[int, TextPiece]]]:
    """Batches of pieces from a place on."""
    batch: list[tuple[int, TextPiece]] = []
    nbytes = 0
    for number, piece in recipe.pieces(file, offset):
        batch.append((number, piece))
        nbytes += len(piece.text)
        if len(piece.text) > _WARNED_NBYTES and recipe.tokenizer is not None:
            # Before the memory is taken: that may end the process without a word.
            mb = len(piece.text) / 1e6
            print(
                f"{recipe.sources.files[number]}: {mb:.0f} MB cannot be cut without changing a token; they are "
                f"tokenised at once, which takes about {mb * 0.15:.0f} GB of memory",
                file=sys.stderr,
                flush=True,
            )
        if nbytes >= BATCH_NBYTES - PIECE_NBYTES or len(batch) == _MAX_PIECES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


# The tokens of text files are kept in a cache, and made if they are not there.


def recipe_of(
    path: str | None,
    *,
    tokenizer: str | None,
    document_end: str | None,
    text_field: str,
    cache_dir: str | None,
    out: Path | None = None,
) -> tuple[Recipe, Path]:
    """How the files of `path` become tokens, and the folder in which those are kept; see `TextDataset`.

    Args:
        out: a folder that is written to, in place of the cache: nothing is read from there.

    Raises: as `TextDataset`.
    """
    cache = cache_folder(cache_dir)
    text_tokenizer = None if tokenizer is None else TextTokenizer(tokenizer)
    sources = find_sources(path, without=[cache, *([] if out is None else [out])], text_field=text_field)
    return Recipe(sources, text_tokenizer, document_end, text_field), cache


def prepare_in_cache(recipe: Recipe, cache: Path) -> TokenStore:
    """The tokens of a recipe's files: those of a single file of bytes where it lies, others from a store in the cache,
    made if it is not there yet.

    Raises:
        ValueError: the cache cannot take the store; or as of `write_store`.
    """
    sources, files = recipe.sources, recipe.sources.files
    if recipe.tokenizer is None and len(files) == 1 and is_plain(files[0]) and not sources.leaves_data:
        return TokenStore([Shard(files[0], files[0].stat().st_size)], recipe.dtype, vocab_size=recipe.vocab_size)
    with naming_setting("data.cache_dir", cache):
        paths = _hash("\n".join(str(file.absolute()) for file in files))
        states = _hash("\n".join(f"{status.st_size} {status.st_mtime_ns}" for status in map(Path.stat, files)))
        prefix = f"{'text' if recipe.tokenizer is None else 'tokens'}-{paths}-{recipe.fingerprint}-"
        folder = cache / f"{prefix}{states}"
        remove_abandoned(cache, superseded=prefix, keep=folder.name)
        store = TokenStore.open(kept_store(folder, files, recipe.fingerprint, partial(write_store, recipe)))
    store.sources = files
    return store


def prepare_in_folder(recipe: Recipe, folder: Path) -> TokenStore:
    """The tokens of a recipe's files, in a folder of their own.

    Raises:
        ValueError: the folder holds something else or cannot take them; or as of `write_store`.
    """
    with naming_setting("--out", folder):
        names = set() if not folder.exists() else {entry.name for entry in folder.iterdir()}
        if names and LOCK_NAME not in names:
            raise ValueError(f"--out={folder} holds other files; give a folder that is empty, or that is not there yet")
        seal = read_note(folder / SEAL_NAME, Seal)
        if seal is not None and seal.recipe != recipe.fingerprint:
            raise ValueError(f"--out={folder} holds tokens that were made with other settings; give another folder")
        write = partial(write_store, recipe)
        return TokenStore.open(kept_store(folder, recipe.sources.files, recipe.fingerprint, write, private=False))


@contextmanager
def naming_setting(setting: str, folder: Path) -> Iterator[None]:
    """Inside, an error of writing to a folder names the setting it was given by.

    Raises:
        ValueError: the folder cannot be written, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        path, own_path = Path(os.fsdecode(error.filename)).absolute(), folder.absolute()
        if not path.is_relative_to(own_path) and not own_path.is_relative_to(path):  # neither in it nor above it
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"{setting}={folder} has no room for the prepared text ({error.strerror}); what is done is kept, and "
                "the same command goes on: make room, or give another folder"
            ) from error
        raise ValueError(
            f"{setting}={folder} cannot take the prepared text ({error}); give a folder that can be written"
        ) from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
