"""Open files of which only regular ones are meant, so that a FIFO, a device or a folder in their place stops nobody."""

import errno
import os
import stat
from contextlib import suppress


class NotRegularError(OSError):
    """Something else lies where a regular file must."""

    strerror: str

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        super().__init__(errno.EINVAL, f"it is {kind_of(mode)}, and must be a regular file", os.fspath(path))


def only_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """An opener, as in `open(path, "w", opener=only_regular)`: a FIFO without a reader would make that wait for ever.

    Raises:
        NotRegularError: it is no regular file.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise NotRegularError(path, stat.S_IFDIR) from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise NotRegularError(path, os.stat(path).st_mode) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(path, status.st_mode)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def only_new(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for a temporary file: what lies there, of a process that was killed or of nobody, goes first. A link
    goes, and not the file behind it.

    Raises:
        OSError: a folder lies there, or the file cannot be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def kind_of(mode: int) -> str:
    """The kind of a file, in words, by its `st_mode`."""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")
