"""A disk to offload to: one file for each rank, read and written in pieces by a few threads."""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from zerotrain.device.device import DONE, Event
from zerotrain.device.kinds import mapped_bytes
from zerotrain.offload.memory import PAGE_NBYTES, whole_pages
from zerotrain.offload.scratch_file import ScratchFile, lies_in_memory
from zerotrain.offload.tier import Place, Tier, Window
from zerotrain.offload.transfer import OnThreadAndStream, OnThreads

PIECE_NBYTES = 4 * 2**20
"""Size of one read or write. Measured (2026-11-21, a virtual disk, 256 MiB): one thread wrote 0.9 to 1.5 GB/s and read
0.6 to 0.9, four wrote 2.4 and read 1.0."""
NUM_THREADS = 4


class Gaps:
    """Ranges of a file that are not used, none next to another."""

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}
        """By where they begin."""

    def add(self, start: int, nbytes: int) -> None:
        """A range is not used any more."""
        before = next((each for each, size in self._nbytes.items() if each + size == start), start)
        if before != start:
            nbytes += self._nbytes.pop(before)
        self._nbytes[before] = nbytes + self._nbytes.pop(before + nbytes, 0)

    def take(self, nbytes: int) -> int | None:
        """Reserve bytes in the smallest gap that has room; returns their offset. None: no gap has."""
        fitting = [start for start, size in self._nbytes.items() if size >= nbytes]
        if not fitting:
            return None
        start = min(fitting, key=self._nbytes.__getitem__)
        if rest := self._nbytes.pop(start) - nbytes:
            self._nbytes[start + nbytes] = rest
        return start


class DiskTier(Tier):
    """The disk that a folder lies on.

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
        self._copying = self._device.stream()
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
        first = start // PAGE_NBYTES * PAGE_NBYTES
        memory = mapped_bytes(whole_pages(start + nbytes - first))
        bytes_there = memory.numpy().data
        for at in range(0, memory.nbytes, PIECE_NBYTES):
            self.file.read(place.offset + first + at, bytes_there[at : at + PIECE_NBYTES])
        return memory[start - first : start - first + nbytes]

    def forget(self, place: Place) -> None:
        self._maps[place].madvise(mmap.MADV_DONTNEED)

    def window(self, nbytes: int) -> Window:
        return Window(self._device.bytes_for(nbytes, self._copying), self._staging(nbytes))

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
        on_host = window.memory if window.staging is None else window.staging
        parts = self._pieces(self.file.read, place, on_host)
        if window.staging is None:
            return OnThreads(parts)
        return OnThreadAndStream(self._conductor.submit(self._up, OnThreads(parts), window, place.nbytes, unused))

    def _store(self, window: Window, place: Place) -> Event:
        if window.staging is None:
            return OnThreads(self._pieces(self.file.write, place, window.memory))
        return OnThreads([self._conductor.submit(self._down, self.read(), window, place)])

    def _pieces(
        self, call: Callable[[int, memoryview], None], place: Place, on_host: torch.Tensor
    ) -> "list[Future[None]]":
        bytes_there = on_host.numpy().data
        return [
            self._threads.submit(
                call, place.offset + start, bytes_there[start : min(start + PIECE_NBYTES, place.nbytes)]
            )
            for start in range(0, place.nbytes, PIECE_NBYTES)
        ]

    def _up(self, on_host: Event, window: Window, nbytes: int, unused: Event) -> Event:
        assert window.staging is not None
        on_host.wait()
        return self._copying.copy(window.memory[:nbytes], window.staging[:nbytes], after=[unused])

    def _down(self, computed: Event, window: Window, place: Place) -> None:
        assert window.staging is not None
        computed.settle()
        self._copying.copy(window.staging[: place.nbytes], window.memory[: place.nbytes]).settle()
        OnThreads(self._pieces(self.file.write, place, window.staging)).wait()
