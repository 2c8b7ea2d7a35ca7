"""Files made of other files once and kept: written whole, sealed with hashes, made anew where they no longer fit.

Beside `<name>.bin` lies `<name>.json`, its seal: the size and the hash of the file, the hash of its sources, and a
stamp of the files the hashes were taken of. While the stamp fits, nothing has been written to them since, and they are
not read again: the ranks of a run find it as the process has left it that started them. No program sets a file's time
of change, which is part of the stamp; sizes and times of modification can be the same for other text.
"""

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

PIECE_NBYTES = 1 << 24
"""Hashed by one thread at a time: 1.8 GB/s each, where the CPU has instructions for SHA-256."""
_TICK_S = 0.05
"""Longer than the steps of a file system's clock. Whatever is written a step later has another time of change."""


@dataclass(frozen=True)
class Seal:
    """What a kept file and its sources were when they were read whole."""

    nbytes: int
    sha256: str
    """Of the kept file."""
    sources_sha256: str
    stamp: str
    """Of the sizes, times and places on disk of the file and its sources."""


def kept_file(path: Path, sources: Sequence[Path], write: Callable[[BinaryIO], None]) -> Path:
    """`path`, with what `write` gives it, made now if it is not there or not what was made of these sources.

    Only the user may read it: who may read the cache's folder may not be allowed to read the sources.

    Raises:
        OSError: it cannot be written, or a source not be read.
    """
    if path.exists():
        reason = _misfit(path, sources)
        if reason is None:
            return path
        print(f"{path} is made anew: {reason}", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    # Before they are read for `write`: what is changed meanwhile does not fit the seal.
    sources_sha256 = sha256_of(sources)
    _write_whole(path, write)
    stamp = _stamp([path, *sources])
    _write_seal(path, Seal(path.stat().st_size, sha256_of([path]), sources_sha256, stamp))
    return path


def remove_abandoned(folder: Path) -> None:
    """Remove what writers that were killed have left half written. One that lives has its file locked."""
    for left in folder.glob("*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # another user's, or of a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def sha256_of(files: Sequence[Path]) -> str:
    """Hash the contents of some files: the SHA-256 of those of their pieces, on all cores."""
    pieces = [(file, start) for file in files for start in range(0, max(1, file.stat().st_size), PIECE_NBYTES)]
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


def _misfit(path: Path, sources: Sequence[Path]) -> str | None:
    """Why a kept file is not to be used; None where it is."""
    try:
        seal = Seal(**json.loads(_seal_path(path).read_text()))
    except FileNotFoundError:
        return "nothing beside it says what it holds"
    except (ValueError, TypeError, OSError):
        return f"what it holds cannot be read from {_seal_path(path).name}"
    stamp = _stamp([path, *sources])
    if stamp == seal.stamp:
        return None
    nbytes = path.stat().st_size
    if nbytes != seal.nbytes:
        return f"it has {nbytes} bytes, and had {seal.nbytes} when it was made"
    if sha256_of([path]) != seal.sha256:
        return "its bytes are not those that were written"
    if sha256_of(sources) != seal.sources_sha256:
        return "the text it was made of has changed"
    with suppress(OSError):  # of another user, or in a folder that is only read: hashed again the next time
        _write_seal(path, replace(seal, stamp=stamp))
    return None


def _stamp(files: Sequence[Path]) -> str:
    """Differs once anything has been written to one of the files, from now on."""
    states = [file.stat() for file in files]
    if any(abs(time.time() - state.st_ctime) < _TICK_S for state in states):
        time.sleep(_TICK_S)
        states = [file.stat() for file in files]
    marks = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino) for state in states]
    return hashlib.sha256(repr(marks).encode()).hexdigest()


def _seal_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_seal(path: Path, seal: Seal) -> None:
    _write_whole(_seal_path(path), lambda file: file.write(json.dumps(asdict(seal)).encode()))


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, locked, and move it into place: ranks that do so at the same time, or a process
    killed half way, leave no broken file under its name."""
    descriptor, temporary = _locked_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _locked_temporary(path: Path) -> tuple[int, str]:
    while True:
        descriptor, name = tempfile.mkstemp(
            dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp"
        )  # for the user alone
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(name):  # and was not taken for abandoned before it was locked
            return descriptor, name
        os.close(descriptor)
