"""One run at a time in a run folder."""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zerotrain.errors import ConfigError
from zerotrain.files.regular import NotRegularError, only_regular
from zerotrain.files.untrusted import UntrustedFileError, read_json, shown

LOCK_NAME = ".lock"
_OF_THE_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL, errno.EISDIR,
)  # fmt: skip
"""What is wrong with a folder as such; a disk that is full is no setting."""
_MAX_NBYTES = 10_000
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder; two at once trained one's config and reported the other's success (2026-11-21).

    The kernel drops the lock with the process, however that ends. The file stays, so that nobody locks one that is
    about to go.

    Raises:
        ConfigError: another run is under way there, or it is no folder that can be written.
    """
    with _opened(run_dir) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"hydra.run.dir: got {run_dir}, where a run is under way ({_holder(run_dir)}); it must be a folder of "
                "its own; wait for that run to end, or give another"
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            print(f"warning: {run_dir} cannot be locked ({error.strerror}); start no other run there", file=sys.stderr)
        file.truncate(0)
        file.write(json.dumps(_myself()) + "\n")
        file.flush()
        yield


def note_kept(run_dir: Path) -> None:
    """Say in the lock, which this process holds, that the completed run in the folder was left as it is."""
    with open(run_dir / LOCK_NAME, "w", opener=only_regular) as file:
        file.write(json.dumps(_myself() | {"kept": True}) + "\n")


def was_kept(run_dir: Path) -> bool:
    """Whether the last process that held the lock of a folder has said so."""
    try:
        return read_json(run_dir / LOCK_NAME, {"kept": bool}, max_nbytes=_MAX_NBYTES)["kept"] is True
    except (OSError, UntrustedFileError):
        return False


def _myself() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}


def _opened(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return open(run_dir / LOCK_NAME, "a+", opener=_no_link)
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


def _holder(run_dir: Path) -> str:
    """The process that holds the lock, as it says itself."""
    try:
        said = read_json(run_dir / LOCK_NAME, {"pid": int, "host": str, "started": str}, max_nbytes=_MAX_NBYTES)
        return f"pid {said['pid']} on {shown(said['host'])}, started {shown(said['started'])}"
    except (OSError, UntrustedFileError):  # it is about to say so
        return "started just now"


def _no_link(path: str, flags: int) -> int:
    """A link is not followed: the file that it leads to would be emptied."""
    return only_regular(path, flags | os.O_NOFOLLOW)
