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
from typing import TextIO

from zerotrain.errors import ConfigError

LOCK_NAME = ".lock"
_OF_THE_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL, errno.EISDIR,
)  # fmt: skip
"""What is wrong with a folder as such; a disk that is full is no setting."""
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
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}) + "\n")
        file.flush()
        yield


def _opened(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return (run_dir / LOCK_NAME).open("a+")
    except OSError as error:
        if error.errno not in _OF_THE_FOLDER:
            raise
        raise ConfigError(
            f"hydra.run.dir: got {run_dir}, which cannot be written: {error.strerror}; give a folder that can"
        ) from error


def _holder(run_dir: Path) -> str:
    """The process that holds the lock, as it says itself."""
    try:
        said = json.loads((run_dir / LOCK_NAME).read_text())
        return f"pid {said['pid']} on {said['host']}, started {said['started']}"
    except (ValueError, KeyError):  # it is about to say so
        return "started just now"
