"""One process at a time makes what is in a folder; the others wait as long as it takes, and say for whom."""

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
from typing import BinaryIO

from zerotrain.files.untrusted import UntrustedFileError, read_json, shown

LOCK_NAME = "lock"
MAX_LOCK_NBYTES = 10_000
REMINDER_S = 10.0
_POLL_S = 0.1
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def sole_writer(folder: Path, *, private: bool) -> Iterator[None]:
    """Inside, no other process of this machine is inside for the same folder, which is made.

    The kernel drops the lock with the process, however that ends.

    Args:
        private: the folder is made for the user alone.

    Raises:
        OSError: the folder cannot be made or written.
    """
    with _locked_file(folder, private=private) as file:
        said = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps(said).encode())
        except OSError as error:  # a full disk: the system names no file that is open already
            error.filename = str(folder)
            raise
        yield


def try_lock(folder: Path) -> BinaryIO | None:
    """The locked file of a folder that is there; None where another process has it."""
    try:
        file = (folder / LOCK_NAME).open("r+b")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def _locked_file(folder: Path, *, private: bool) -> Iterator[BinaryIO]:
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        with (folder / LOCK_NAME).open("a+b") as file:
            _wait(file, folder)
            # Who held it may have removed the folder as abandoned.
            if _is_at(file, folder / LOCK_NAME):
                yield file
                return


def _wait(file: BinaryIO, folder: Path) -> None:
    started_s, next_s = time.monotonic(), REMINDER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited_s = time.monotonic() - started_s
            if waited_s >= next_s:
                next_s += REMINDER_S
                print(f"waits for {_holder(folder)}, which prepares {folder} ({waited_s:.0f} s)", file=sys.stderr)
            time.sleep(_POLL_S)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            print(f"warning: {folder} cannot be locked ({error.strerror}); prepare nothing else there", file=sys.stderr)
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(folder: Path) -> str:
    """The process that holds the lock, as it says itself."""
    try:
        said = read_json(folder / LOCK_NAME, {"pid": int, "host": str}, max_nbytes=MAX_LOCK_NBYTES)
        return f"pid {said['pid']} on {shown(said['host'])}"
    except (OSError, UntrustedFileError):  # it is about to say so
        return "another process"
