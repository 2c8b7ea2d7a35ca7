"""A disk to offload to: one file for each rank, read and written in pieces by a few threads."""

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from zerotrain.device.device import DONE, Event, mapped_bytes
from zerotrain.errors import OffloadError
from zerotrain.offload.tier import PAGE_NBYTES, OnThreadAndStream, OnThreads, Place, Tier, Window, whole_pages

# A file without a name: its room on a disk is free again once the process has ended, in any way.
#
# It is read and written past the page cache, so that memory stays what it is, and mapped for whoever looks at it
# between steps. Reads and writes that fail are told with the folder and what was to be done.


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
            # Making a folder fails as if it were there already where something else is.
            is_other = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "it is no folder" if is_other else error.strerror
            raise OffloadError(f"offload.path: no file can be made in {folder} ({reason})") from error
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
        position = 0
        while position < len(part):
            # A signal or a failing disk may end a call early, at no page's border: a direct one cannot go on there.
            descriptor = self._direct if position % PAGE_NBYTES == 0 else self._cached
            try:
                count = call(descriptor, [part[position:]], start + position)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._cached:  # opened so, and refused all the same
                    self._go_through_cache(error)
                    continue
                raise self._failed(f"cannot be {done_to}", start + position, len(part) - position, error) from error
            if count == 0:
                raise self._failed(f"cannot be {done_to}", start + position, len(part) - position, None)
            position += count

    def _failed(self, what: str, start: int, nbytes: int, error: OSError | None) -> OffloadError:
        why = "the file ends there" if error is None else error.strerror
        return OffloadError(
            f"offload.path: the file of {self._whose} in {self.folder} {what} at bytes {start} to {start + nbytes} "
            f"({why}): its part of the training state is lost; resume from the last checkpoint, with offload.path on a "
            "disk that works"
        )


def lies_in_memory(folder: Path) -> bool:
    """Whether a folder lies in memory, as /dev/shm does and often /tmp."""
    return file_system_of(folder) in ("tmpfs", "ramfs")


def file_system_of(folder: Path) -> str:
    """The kind of a folder's file system, such as ext4; empty if the system does not tell."""
    kind, longest = "", -1
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    resolved = folder.resolve()
    for fields in (line.split() for line in lines):
        point = Path(fields[1].replace("\\040", " "))
        if resolved.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = fields[2], len(point.parts)
    return kind


PIECE_NBYTES = 4 * 2**20
"""Size of one read or write. Measured (2026-11-21, a virtual disk, 256 MiB): one thread wrote 0.9 to 1.5 GB/s and read
0.6 to 0.9, four wrote 2.4 and read 1.0."""
NUM_THREADS = 4


class Gaps:
    """Unused ranges of a file, none next to another."""

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}
        """By where they begin."""

    def add(self, start: int, nbytes: int) -> None:
        """A range is not used any more."""
        begin = next((gap for gap, size in self._nbytes.items() if gap + size == start), start)
        if begin != start:
            nbytes += self._nbytes.pop(begin)
        self._nbytes[begin] = nbytes + self._nbytes.pop(begin + nbytes, 0)

    def take(self, nbytes: int) -> int | None:
        """Reserve bytes in the smallest gap with room; returns their offset. None: no gap has."""
        fitting = [start for start, size in self._nbytes.items() if size >= nbytes]
        if not fitting:
            return None
        start = min(fitting, key=self._nbytes.__getitem__)
        if rest := self._nbytes.pop(start) - nbytes:
            self._nbytes[start + nbytes] = rest
        return start


class DiskTier(Tier):
    """The disk of a folder.

    Args:
        whose: for errors, such as "rank 0".

    Raises:
        OffloadError: no file can be made in the folder.
    """

    name = "disk"

    def __init__(self, device: torch.device, folder: Path, whose: str) -> None:
        super().__init__(device)
        self.file = ScratchFile(folder, whose)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="zerotrain-offload")
        self._maps: dict[Place, mmap.mmap] = {}
        self._free = Gaps()
        # A thread of its own, where there is staging: it waits for the pieces, which must not wait for it.
        self._conductor = ThreadPoolExecutor(1, thread_name_prefix="zerotrain-offload-gpu")

    @property
    def where(self) -> str:
        if lies_in_memory(self.file.folder):
            return f"{self.file.folder}, which lies in memory"
        why = self.file.buffered_because
        how = "past the page cache" if why is None else f"through the page cache, since {why}"
        return f"the disk of {self.file.folder} ({how})"

    def place(self, nbytes: int) -> Place:
        nbytes = whole_pages(nbytes)
        start = self._free.take(nbytes)
        if start is None:
            start = self.file.extend(nbytes)
        mapped, memory = self.file.mapped(start, nbytes)
        place = Place(memory, start)
        self._maps[place] = mapped
        self.placed_nbytes += nbytes
        return place

    def free(self, place: Place) -> None:
        del self._maps[place]  # which is unmapped when nobody has a view of it any more
        self.placed_nbytes -= place.nbytes
        self._free.add(place.offset, place.nbytes)

    def look(self, place: Place, start: int, nbytes: int) -> torch.Tensor:
        page_start = start // PAGE_NBYTES * PAGE_NBYTES
        memory = mapped_bytes(whole_pages(start + nbytes - page_start))
        bytes_there = memory.numpy().data
        for at in range(0, memory.nbytes, PIECE_NBYTES):
            self.file.read(place.offset + page_start + at, bytes_there[at : at + PIECE_NBYTES])
        return memory[start - page_start : start - page_start + nbytes]

    def forget(self, place: Place) -> None:
        self._maps[place].madvise(mmap.MADV_DONTNEED)

    def window(self, nbytes: int) -> Window:
        return Window(self._device.bytes_for(nbytes, self._reading), self._staging(nbytes))

    def _unwaited_window(self, nbytes: int) -> Window:
        if self._device.is_host:
            return self.window(nbytes)
        return Window(super()._unwaited_window(nbytes).memory, self._staging(nbytes))

    def _staging(self, nbytes: int) -> torch.Tensor | None:
        return None if self._device.is_host else self._device.host_bytes(nbytes)

    def settled(self, event: Event) -> Event:
        event.settle()
        return DONE

    def _fetch(self, place: Place, window: Window, stored: Event, unused: Event) -> Event:
        stored.settle()
        memory, staging = window.memory[: place.nbytes], window.staging
        if staging is None:
            return OnThreads(self._pieces(self.file.read, place, window.memory))
        read = OnThreads(self._pieces(self.file.read, place, staging))

        def copy_to_device() -> Event:
            read.wait()
            return self._reading.copy(memory, staging[: place.nbytes], events=[unused])

        return OnThreadAndStream(self._conductor.submit(copy_to_device))

    def _store(self, window: Window, place: Place) -> Event:
        memory, staging = window.memory[: place.nbytes], window.staging
        if staging is None:
            return OnThreads(self._pieces(self.file.write, place, window.memory))
        computed = self.read()

        def copy_to_disk() -> None:
            computed.settle()
            self._reading.copy(staging[: place.nbytes], memory).settle()
            OnThreads(self._pieces(self.file.write, place, staging)).wait()

        return OnThreads([self._conductor.submit(copy_to_disk)])

    def _pieces(
        self, call: Callable[[int, memoryview], None], place: Place, on_host: torch.Tensor
    ) -> "list[Future[None]]":
        bytes_there = on_host.numpy().data
        pieces = []
        for start in range(0, place.nbytes, PIECE_NBYTES):
            part = bytes_there[start : min(start + PIECE_NBYTES, place.nbytes)]
            pieces.append(self._threads.submit(call, place.offset + start, part))
        return pieces
