"""One process at a time makes what is in a folder; the others wait as long as it takes, and say for whom."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zerotrain.files.lock import can_lock, holder, lock, note_holder, open_lock

LOCK_NAME = "lock"
REMINDER_S = 10.0
_POLL_S = 0.1


@contextmanager
def sole_writer(folder: Path, *, private: bool) -> Iterator[None]:
    """Inside, no other process of this machine is inside for the same folder, which is made.

    Args:
        private: the folder is made for the user alone.

    Raises:
        OSError: the folder cannot be made or written.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        with open_lock(folder / LOCK_NAME) as file:
            _wait(file, folder)
            if not _is_at(file, folder / LOCK_NAME):
                continue  # who held it has removed the folder as abandoned
            try:
                note_holder(file)
            except OSError as error:  # a full disk: the system names no file that is open already
                error.filename = str(folder)
                raise
            yield
            return


def try_lock(folder: Path) -> BinaryIO | None:
    """The locked file of a folder that is there; None where another process has it."""
    try:
        file = open_lock(folder / LOCK_NAME, make=False)
    except OSError:
        return None
    if can_lock(file):
        return file
    file.close()
    return None


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


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
