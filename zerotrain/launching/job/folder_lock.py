"""One run at a time in a run folder."""

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypedDict

from zerotrain.errors import ConfigError
from zerotrain.files.lock import LOCK_NAME, holder, lock, note_holder, open_lock, read_note
from zerotrain.files.untrusted import NotRegularError

_OF_THE_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL, errno.EISDIR,
)  # fmt: skip
"""Errors of a folder as such: a setting can mend them, unlike a full disk."""


class _LockNote(TypedDict):
    job: str


_INSTANT_S = 0.02
"""A report that looks whether a run is under way locks its folder, for far less than this."""


class FolderInUseError(ConfigError):
    """Another run is under way in the folder."""


@contextmanager
def locked(run_dir: Path, **note: str) -> Iterator[None]:
    """Keep other runs out of a folder; two at once trained one's config and reported the other's success (2026-11-21).
    The file stays, so that nobody locks one that is about to go.

    Args:
        note: what the lock says of its holder beside its process.

    Raises:
        FolderInUseError: another run is under way there.
        ConfigError: it is no folder that can be written.
    """
    with _opened(run_dir) as file:
        try:
            try:
                problem = lock(file)
            except BlockingIOError:
                time.sleep(_INSTANT_S)
                problem = lock(file)
        except BlockingIOError:
            raise FolderInUseError(
                f"hydra.run.dir: got {run_dir}, where a run is under way ({holder(run_dir / LOCK_NAME)}); wait for "
                "that run to end, or give another folder"
            ) from None
        if problem is not None:
            print(f"warning: {run_dir} cannot be locked ({problem}); start no other run there", file=sys.stderr)
        note_holder(file, **note)
        yield


def holding_job(run_dir: Path) -> str | None:
    """The job of a sweep that the last holder of a folder's lock was, as it has noted; None if none."""
    said = read_note(run_dir / LOCK_NAME, _LockNote)
    return None if said is None else str(said["job"])


def await_free(run_dir: Path) -> None:
    """Wait until the run that is under way in a folder has ended."""
    with suppress(OSError), open_lock(run_dir / LOCK_NAME, make=False) as file:
        lock(file, wait=True)


def _opened(run_dir: Path) -> BinaryIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return open_lock(run_dir / LOCK_NAME)
    except NotRegularError as error:
        raise ConfigError(
            f"hydra.run.dir: got {run_dir}, whose {LOCK_NAME} cannot be locked: {error.strerror}; remove it, or give "
            "another folder"
        ) from error
    except OSError as error:
        if error.errno not in _OF_THE_FOLDER:
            raise
        raise ConfigError(
            f"hydra.run.dir: got {run_dir}, which cannot be written: {error.strerror}; give a folder that can"
        ) from error
