"""Stores of tokens made of text once and kept: whole or not there, sealed with hashes, made anew where they do not fit.

In a store's folder lies its seal, `seal.json`: the size and the hash of the store's files, the hash of its sources, and
a stamp of the files the hashes were taken of. While the stamp fits, nothing has been written to them since, and they
are not read again: the ranks of a run find it as the process has left it that started them. No program sets a file's
time of change, which is part of the stamp; sizes and times of modification can be the same for other text.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zerotrain.data.preparing.lock import sole_writer, try_lock
from zerotrain.data.preparing.writer import forget_notes, is_begun, remove_store
from zerotrain.data.store.store import INDEX_NAME
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import Natural, UntrustedFileError, read_json

SEAL_NAME = "seal.json"
MAX_SEAL_NBYTES = 1 << 16
PIECE_NBYTES = 1 << 24
"""Hashed by one thread at a time: 1.8 GB/s each, where the CPU has instructions for SHA-256."""
ABANDONED_S = 7 * 86400.0
"""Unfinished stores are removed once nobody has gone on with them for so long."""
_STORE_NAME = re.compile("(text|tokens)(-[0-9a-f]{16}){3}")
"""Not `text-2026-11-23`, a folder of the user's own in what somebody named as the cache."""
_TICK_S = 0.05
"""Longer than the steps of a file system's clock. Whatever is written a step later has another time of change."""


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
    """The folder for what can be made again of the data; it need not be there yet."""
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
        private: only the user may read it: who may read the cache's folder may not be allowed to read the sources.

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
        if (folder / SEAL_NAME).exists() or ((folder / INDEX_NAME).exists() and not is_begun(folder)):
            print(f"{folder} is made anew: {reason}", file=sys.stderr, flush=True)
            remove_store(folder)
            (folder / SEAL_NAME).unlink(missing_ok=True)
        marks = _marks(sources)  # before they are read
        try:
            sources_sha256 = sha256_of(sources)
            write(folder, f"{sources_sha256} {_stamp(marks)}")
        except Exception:
            _require_unchanged(sources, marks, folder)  # half a line of JSON is not broken, but still being written
            raise
        made = _files(folder)
        stamp = _stamp(_marks(made) + marks)
        seal = Seal(_nbytes(made), sha256_of(made), sources_sha256, stamp, recipe)
        _require_unchanged(sources, marks, folder)
        _write_seal(folder, seal)
        forget_notes(folder)
    return folder


def sealed_recipe(folder: Path) -> str | None:
    """How the tokens in a folder were made of their sources; None where nothing there says so."""
    try:
        return str(_read_seal(folder).recipe)
    except (OSError, UntrustedFileError):
        return None


def remove_abandoned(cache: Path, *, superseded: str, keep: str) -> None:
    """Remove stores that were begun in a cache and that nobody will complete: of files that have changed since, and
    those of long ago.

    Args:
        superseded: what the names of stores of the same paths begin with.
        keep: the name of the one that is of use.
    """
    for folder in cache.iterdir() if cache.is_dir() else ():
        if (
            folder.name == keep
            or not folder.is_dir()
            or (folder / SEAL_NAME).exists()
            or _STORE_NAME.fullmatch(folder.name) is None
        ):
            continue
        with suppress(OSError):  # another user's
            is_old = time.time() - folder.stat().st_mtime > ABANDONED_S
            if (is_old or folder.name.startswith(superseded)) and (lock := try_lock(folder)) is not None:
                with lock:
                    shutil.rmtree(folder)


def store_name(kind: str, paths: str, states: str, recipe: str) -> str:
    """The name of a store in a cache.

    Args:
        kind: "text" or "tokens".
        paths, states, recipe: hashes of where the files lie, what state they are in, and what is made of them.
    """
    return f"{kind}-{paths}-{recipe}-{states}"


def sha256_of(files: Sequence[Path]) -> str:
    """Hash the contents of some files: the SHA-256 of those of their pieces, on all cores."""
    pieces = ((file, start) for file in files for start in range(0, max(1, file.stat().st_size), PIECE_NBYTES))
    whole = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for digest in pool.map(_sha256_of_piece, pieces):
            whole.update(digest)
    return whole.hexdigest()


def _sha256_of_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(PIECE_NBYTES)).digest()


def misfit(folder: Path, sources: Sequence[Path], recipe: str) -> str | None:
    """Why a store is not to be used; None where it is."""
    try:
        seal = _read_seal(folder)
        made = _files(folder)
    except FileNotFoundError:
        return "nothing in it says what it holds"
    except (UntrustedFileError, OSError):
        return f"what it holds cannot be read from {SEAL_NAME}"
    if seal.recipe != recipe:
        return "it was made with other settings"
    if not made[-1].exists():
        return f"it has no {INDEX_NAME}"
    stamp = _stamp(_marks([*made, *sources]))
    if stamp == seal.stamp:
        return None
    nbytes = _nbytes(made)
    if nbytes != seal.nbytes:
        return f"it has {nbytes} bytes, and had {seal.nbytes} when it was made"
    if sha256_of(made) != seal.sha256:
        return "its bytes are not those that were written"
    if sha256_of(sources) != seal.sources_sha256:
        return "the text it was made of has changed"
    with suppress(OSError):  # of another user, or in a folder that is only read: hashed again the next time
        _write_seal(folder, replace(seal, stamp=stamp))
    return None


def _files(folder: Path) -> list[Path]:
    """Those of a store."""
    return [*sorted(folder.glob("*.bin")), folder / INDEX_NAME]


def _nbytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


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


def _read_seal(folder: Path) -> Seal:
    seal: Seal = read_json(folder / SEAL_NAME, Seal, max_nbytes=MAX_SEAL_NBYTES)
    return seal


def _require_unchanged(sources: Sequence[Path], marks: list[tuple[int, ...]], folder: Path) -> None:
    """Remove what was made, with a ValueError, of files that are no longer as they were before they were read."""
    for source, before in zip(sources, marks, strict=True):
        try:
            is_same = _mark(source.stat()) == before
        except FileNotFoundError:
            is_same = False
        if not is_same:
            remove_store(folder)
            raise ValueError(
                f"data.path: {source} was written to while it was read; start again once nothing writes to it, or give "
                "a copy of it"
            )


def _write_seal(folder: Path, seal: Seal) -> None:
    with whole(folder / SEAL_NAME, lasting=True) as file:
        file.write(json.dumps(asdict(seal)).encode())
