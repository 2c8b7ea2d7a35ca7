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
    with _replacing(path) as temporary, open(temporary, "wb", opener=only_new) as file:
        yield file
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    if lasting:
        sync_folder(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Let `path` be a link to `target`, at once in place of the link or file that has the name. A process that is
    killed may leave `PATH.*.tmp`.

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
