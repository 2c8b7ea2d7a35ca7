"""Looks once through all tokens of a store for such as are beyond the vocabulary, and keeps what it found."""

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zerotrain.data.store.store import TokenStore
from zerotrain.data.store.windows import unknown_token
from zerotrain.files.lock import lock, open_lock
from zerotrain.files.untrusted import Natural, UntrustedFileError, parse_json, read_regular

PIECE_TOKENS = 1 << 23
"""Looked at by one thread of `_NUM_THREADS`, then by another."""
_READ_TOKENS = 1 << 19
"""Read at a time: so many stay in the processor's cache."""
_NUM_THREADS = min(4, os.cpu_count() or 1)
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Extremes:
    """The smallest and the largest token of a store, and the first place of each."""

    smallest: int
    smallest_at: Natural
    largest: int
    largest_at: Natural


MAX_NBYTES = 10_000


def require_known(store: TokenStore, *, vocab_size: int, source: str, cache_folder: Path) -> None:
    """Check that every token of a store is in 0..vocab_size - 1.

    Reads all files, unless their dtype has no other numbers, or it is known already what they hold: the smallest and
    the largest token are kept in `cache_folder`, under a name made of the files' paths, sizes, times of change,
    inodes and dtype. One process reads; others of the same machine wait for what it finds.

    Args:
        source: what the tokens are read from, as the user named it ("data.path=corpus.bin").

    Raises:
        OSError: a file cannot be read.
        ValueError: a token is not; with its file and its number there.
    """
    limits = np.iinfo(store.dtype)
    if store.tokens == 0 or (limits.min >= 0 and limits.max < vocab_size):
        return
    found = _kept_extremes(store, source, cache_folder)
    for token, position in ((found.smallest, found.smallest_at), (found.largest, found.largest_at)):
        if not 0 <= token < vocab_size:
            raise unknown_token(store, token, position, vocab_size=vocab_size, source=source)


def _kept_extremes(store: TokenStore, source: str, cache_folder: Path) -> Extremes:
    path = cache_folder / f"scan-{_key(store)}.json"
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(path, mode=0o600)
    except OSError as error:  # of a folder that is only read something may still be known
        with suppress(OSError, UntrustedFileError):
            return _parsed(read_regular(path, max_nbytes=MAX_NBYTES))
        print(
            f"{source}: the facts about its files cannot be kept in data.cache_dir={cache_folder} ({error.strerror}); "
            "each process of the run reads all of them again",
            file=sys.stderr,
            flush=True,
        )
        return _extremes(store, source)
    with file:
        _wait_for(file, source)
        with suppress(UntrustedFileError):  # empty, or half written: by a process that was ended
            return _parsed(file.read(MAX_NBYTES))
        found = _extremes(store, source)
        with suppress(OSError):  # a full disk: found again the next time
            file.seek(0)
            file.write(json.dumps(asdict(found)).encode())
            file.truncate()
            file.flush()
        return found


def _parsed(text: bytes) -> Extremes:
    extremes: Extremes = parse_json(text, Extremes)
    return extremes


def _wait_for(file: BinaryIO, source: str) -> None:
    """Lock a file until it is closed, where files can be locked."""
    try:
        lock(file)
    except BlockingIOError:
        print(f"{source}: waits for another process that reads its files", file=sys.stderr, flush=True)
        lock(file, wait=True)
    except OSError:
        pass


def _key(store: TokenStore) -> str:
    lines = [store.dtype.str]
    for shard in store.shards:
        status = os.stat(shard.path)
        times = status.st_mtime_ns, status.st_ctime_ns  # any program can set the first
        marks = (status.st_size, *times, status.st_ino, shard.first_byte, shard.tokens)
        lines.append(f"{os.path.abspath(shard.path)}\0{marks}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _extremes(store: TokenStore, source: str) -> Extremes:
    """Read all tokens, with a line every few seconds if that takes long."""
    begun = time.monotonic()
    say_at = begun + _SAY_AFTER_S
    starts = range(0, store.tokens, PIECE_TOKENS)
    found: Extremes | None = None
    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        for number, piece in enumerate(pool.map(lambda start: _extremes_of_piece(store, start), starts)):
            found = piece if found is None else _joined(found, piece)
            now = time.monotonic()
            if now >= say_at:
                say_at = now + _SAY_EVERY_S
                done, total = (tokens * store.dtype.itemsize / 1e9 for tokens in (starts[number], store.tokens))
                print(
                    f"{source}: looks once for tokens beyond the vocabulary, {done:.1f} of {total:.1f} GB, "
                    f"{done / (now - begun):.1f} GB/s",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, the rest is not read
    assert found is not None
    return found


def _extremes_of_piece(store: TokenStore, start: int) -> Extremes:
    end = min(store.tokens, start + PIECE_TOKENS)
    return reduce(
        _joined, (_extremes_of(store, at, min(end, at + _READ_TOKENS)) for at in range(start, end, _READ_TOKENS))
    )


def _extremes_of(store: TokenStore, start: int, stop: int) -> Extremes:
    tokens = store.read(start, stop)
    low, high = int(tokens.argmin()), int(tokens.argmax())
    return Extremes(int(tokens[low]), start + low, int(tokens[high]), start + high)


def _joined(first: Extremes, second: Extremes) -> Extremes:
    """The extremes of two pieces, the second behind the first."""
    low = second if second.smallest < first.smallest else first
    high = second if second.largest > first.largest else first
    return Extremes(low.smallest, low.smallest_at, high.largest, high.largest_at)
