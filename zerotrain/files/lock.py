"""The one kind of lock of the house: flock on a file. The kernel drops it with the process, however that ends."""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from zerotrain.files.untrusted import UntrustedFileError, only_new, only_regular, read_json, shown

LOCK_NAME = ".lock"
"""The lock of a run's folder."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Holder(TypedDict):
    """The note of a lock's holder."""

    pid: int
    host: str
    started: str


_MAX_NBYTES = 10_000


def open_lock(path: Path, *, make: bool = True, mode: int = 0o666) -> BinaryIO:
    """The file of a lock, made where there is none. It is locked until it is closed, once `lock` has locked it.

    A link is not followed: the file behind it would be emptied.

    Args:
        make: whether it is made where there is none.
        mode: who may read and write one that is made.

    Raises:
        NotRegularError: a FIFO, a device or a folder lies there.
        OSError: it cannot be opened.
    """
    extra_flags = os.O_NOFOLLOW | (os.O_CREAT if make else 0)
    return open(path, "r+b", opener=lambda name, flags: only_regular(name, flags | extra_flags, mode))


def lock(file: BinaryIO | int, *, shared: bool = False, wait: bool = False) -> str | None:
    """Lock an open file until it is closed.

    Args:
        shared: whether others may hold it too, who have asked for a shared one.
        wait: whether to wait for whoever holds it.

    Returns:
        None; on a file system that has no locks, in words why it is not locked: the caller goes on without.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be locked.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return error.strerror
    return None


def can_lock(file: BinaryIO | int, *, shared: bool = False) -> bool:
    """Lock an open file if possible at once. False where another process holds it, or nobody can tell."""
    try:
        return lock(file, shared=shared) is None
    except OSError:
        return False


def is_held(path: Path) -> bool:
    """Whether another process holds the lock in a file, or may hold it, since nobody can tell."""
    try:
        with open_lock(path, make=False) as file:
            return not can_lock(file)
    except OSError:
        return False


def note_holder(file: BinaryIO) -> None:
    """Note this process in the file of a lock, for `read_note`."""
    note = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), (json.dumps(note) + "\n").encode(), 0)


def read_note(path: Path, kind: Any) -> Any:
    """The note in the file of a lock, or in a small file of its own; None where there is none of this kind."""
    try:
        return read_json(path, kind, max_nbytes=_MAX_NBYTES)
    except (OSError, UntrustedFileError):
        return None


def holder(path: Path) -> str:
    """The holder of a lock, in its own words: "pid 17 on node3, started 2026-11-21 10:00:00"."""
    note = read_note(path, Holder)
    if note is None:  # it is about to say so
        return "another process"
    return f"pid {note['pid']} on {shown(note['host'])}, started {shown(note['started'])}"


# The one way to replace a file: write another beside it. Once that is whole, it gets the name.


@contextmanager
def whole(path: Path, *, lasting: bool = False) -> Iterator[BinaryIO]:
    """Inside, a new file to be written; it replaces `path` at the end. After an error, also one raised by a signal,
    nothing of it is left; a killed process may leave `PATH.*.tmp`.

    Args:
        lasting: whether a power cut, too, leaves it whole or as it was: waits until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    with _replacing(path) as temporary, open(temporary, "wb", opener=only_new) as file:
        yield file
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    if lasting:
        sync(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Let `path` be a link to `target`, at once in place of any link or file of this name. A killed process may leave
    `PATH.*.tmp`.

    Raises:
        OSError: it cannot be written.
    """
    with _replacing(path) as temporary:
        os.symlink(target, temporary)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Inside, the name of what is to be made beside `path`, and gets its name at the end."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync(path: Path) -> None:
    """Wait until a written file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
