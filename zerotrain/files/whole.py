"""The one way to replace a file: write another beside it, which gets its name once it is whole."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zerotrain.files.regular import only_new


@contextmanager
def whole(path: Path, *, lasting: bool = False) -> Iterator[BinaryIO]:
    """Inside, a new file to be written, which replaces `path` at the end. After an error, or a signal that raises one,
    nothing of it is left; a process that is killed may leave `PATH.*.tmp`.

    Args:
        lasting: whether a power cut, too, leaves it whole or as it was: waits until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "wb", opener=only_new) as file:
            yield file
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if lasting:
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Wait until a file that somebody has written is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
