"""One run at a time in a run folder."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zerotrain.errors import ConfigError
from zerotrain.files.lock import holder, lock, note_holder, open_lock, read_note
from zerotrain.files.regular import NotRegularError

LOCK_NAME = ".lock"
_OF_THE_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL, errno.EISDIR,
)  # fmt: skip
"""Errors of a folder as such: a setting can mend them, unlike a full disk."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder; two at once trained one's config and reported the other's success (2026-11-21).
    The file stays, so that nobody locks one that is about to go.

    Raises:
        ConfigError: another run is under way there, or it is no folder that can be written.
    """
    with _opened(run_dir) as file:
        try:
            problem = lock(file)
        except BlockingIOError:
            raise ConfigError(
                f"hydra.run.dir: got {run_dir}, where a run is under way ({holder(run_dir / LOCK_NAME)}); wait for "
                "that run to end, or give another folder"
            ) from None
        if problem is not None:
            print(f"warning: {run_dir} cannot be locked ({problem}); start no other run there", file=sys.stderr)
        note_holder(file)
        yield


def note_kept(run_dir: Path) -> None:
    """Say in the lock, which this process holds, that the completed run in the folder was left as it is."""
    with open_lock(run_dir / LOCK_NAME) as file:
        note_holder(file, kept=True)


def was_kept(run_dir: Path) -> bool:
    """Whether the last process that held the lock of a folder has said so."""
    said = read_note(run_dir / LOCK_NAME, {"kept": bool})
    return said is not None and said["kept"]


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
