"""A file without a name: room on a disk that is gone when the process is, however it ends.

It is read and written past the page cache, so that memory stays what it is, and mapped for whoever looks at it between
steps. Reads and writes that fail are told with the folder and what was to be done.
"""

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from zerotrain.errors import OffloadError
from zerotrain.offload.memory import PAGE_NBYTES


class ScratchFile:
    """Bytes on the disk of a folder.

    Args:
        folder: is made if it is not there.
        whose: for errors, such as "rank 0".

    Raises:
        OffloadError: no file can be made there.
    """

    buffered_because: str | None = None
    """Why reads and writes go through the page cache; None: they go past it."""

    def __init__(self, folder: Path, whose: str) -> None:
        self.folder, self._whose = folder, whose
        path = folder / f".zerotrain-offload-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise OffloadError(f"offload.path: no file can be made in {folder} ({_why(error)})") from error
        weakref.finalize(self, os.close, self._cached)
        self._direct = self._cached
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            weakref.finalize(self, os.close, self._direct)
        except OSError as error:
            self._go_through_cache(error)
        finally:
            os.unlink(path)
        self._nbytes = 0

    def _go_through_cache(self, refused: OSError) -> None:
        self.buffered_because = f"the file system refuses direct access ({refused.strerror})"
        self._direct = self._cached

    def extend(self, nbytes: int) -> int:
        """Room for more bytes, whole pages, at the end; returns where it begins.

        Raises:
            OffloadError: there is none.
        """
        start = self._nbytes
        try:
            os.posix_fallocate(self._cached, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._failed("cannot be made larger", start, nbytes, error) from error
            free = shutil.disk_usage(self.folder).free
            raise OffloadError(
                f"offload.path: {self.folder} has no room for what {self._whose} offloads ({error.strerror}): "
                f"{start / 1e9:.3g} GB of it are there, and {nbytes / 1e9:.3g} GB more are needed, with "
                f"{free / 1e9:.3g} GB free; name a folder on a larger disk, or offload less (offload.keep)"
            ) from error
        self._nbytes = start + nbytes
        return start

    def mapped(self, start: int, nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
        """A part of the file as memory, and as (nbytes,) uint8."""
        mapped = mmap.mmap(self._cached, nbytes, offset=start)
        return mapped, torch.frombuffer(mapped, dtype=torch.uint8)

    def read(self, start: int, into: memoryview) -> None:
        """Fill a page-aligned buffer of whole pages.

        Raises:
            OffloadError: the disk does not give the bytes.
        """
        self._all("read", os.preadv, start, into)

    def write(self, start: int, source: memoryview) -> None:
        """The other way.

        Raises:
            OffloadError: the disk does not take the bytes.
        """
        self._all("written", os.pwritev, start, source)

    def _all(
        self, done_to: str, call: Callable[[int, list[memoryview], int], int], start: int, part: memoryview
    ) -> None:
        done = 0
        while done < len(part):
            # A signal or a failing disk may end a call early, at no page's border: a direct one cannot go on there.
            descriptor = self._direct if done % PAGE_NBYTES == 0 else self._cached
            try:
                count = call(descriptor, [part[done:]], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._cached:  # opened so, and refused all the same
                    self._go_through_cache(error)
                    continue
                raise self._failed(f"cannot be {done_to}", start + done, len(part) - done, error) from error
            if count == 0:
                raise self._failed(f"cannot be {done_to}", start + done, len(part) - done, None)
            done += count

    def _failed(self, what: str, start: int, nbytes: int, error: OSError | None) -> OffloadError:
        why = "the file ends there" if error is None else error.strerror
        return OffloadError(
            f"offload.path: the file of {self._whose} in {self.folder} {what} at bytes {start} to {start + nbytes} "
            f"({why}): its part of the training state is lost; resume from the last checkpoint, with offload.path on a "
            "disk that works"
        )


def _why(error: OSError) -> str:
    """Making a folder fails as if it were there already where something else is."""
    return "it is no folder" if isinstance(error, FileExistsError | NotADirectoryError) else str(error.strerror)


def lies_in_memory(folder: Path) -> bool:
    """Whether a folder lies in memory, as /dev/shm does and often /tmp."""
    return file_system_of(folder) in ("tmpfs", "ramfs")


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder lies on, such as ext4; empty where the system does not tell."""
    found, longest = "", -1
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    resolved = folder.resolve()
    for fields in (line.split() for line in lines):
        point = Path(fields[1].replace("\\040", " "))
        if resolved.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = fields[2], len(point.parts)
    return found
