"""A place to offload to: reserve room, fetch into a window, store from it. Here it is host memory."""

import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import torch

from zerotrain.device.device import DONE, Device, Event
from zerotrain.device.kinds import device_of

# Host memory: its pages, and how much of it there is.


PAGE_NBYTES = 4096
"""Borders for direct reads and writes of any disk."""


def whole_pages(nbytes: int) -> int:
    """The bytes of enough whole pages for so many."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def most_of_process() -> float:
    """Bytes a process may have, as `ulimit -v` says."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def available_nbytes(root: Path = Path("/")) -> float:
    """Bytes that processes started now can have together, swap and files cached in memory included: the machine's, or
    what is left to this process's control groups. As much as there is at all, where no more is known.

    Args:
        root: of the file system that the kernel describes itself in.
    """
    sizes = list(_left_to_groups(root))
    with suppress(OSError, ValueError, KeyError):
        meminfo = _numbers(root / "proc/meminfo")
        sizes.append(1024 * (meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)))
    return min(sizes, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


_OF_GROUPS = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""By the controller that /proc/self/cgroup names, none in version 2: folder, limit, what is used, and of it what the
kernel gives back when it is needed."""


def _left_to_groups(root: Path) -> Iterator[int]:
    """Bytes left to each control group of this process, if it has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, inside in (line.split(":", 2) for line in lines):
        for controller in {"", "memory"} & set(controllers.split(",")):
            folder, limit, used, given_back = _OF_GROUPS[controller]
            top = root / "sys/fs/cgroup" / folder
            group = top / inside.strip("/")
            # In a container the name may be that outside it, and the folder that of the container.
            for ancestor in (group, *group.parents)[: len(group.relative_to(top).parts) + 1]:
                with suppress(OSError, ValueError, KeyError):
                    freed = sum(_numbers(ancestor / "memory.stat")[name] for name in given_back)
                    yield int((ancestor / limit).read_text()) - int((ancestor / used).read_text()) + freed


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in lines such as "MemFree: 1024 kB"."""
    parts = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in parts}


@dataclass(eq=False)
class Place:
    """Room for some tensors of one bucket, for as long as it is not freed."""

    memory: torch.Tensor
    """(nbytes,) uint8: what is there, to be read and written by the host while nothing is under way. A disk that fails
    to give what is read of it ends the process; `Tier.look` raises."""
    offset: int = 0
    """Offset in the file of a disk."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.memory.nbytes


@dataclass(eq=False)
class Window:
    """Memory of the device through which places are seen, one at a time."""

    memory: torch.Tensor
    """(nbytes,) uint8, on the device."""
    staging: torch.Tensor | None = None
    """On the host, for a disk and a GPU: they do not reach each other."""
    unused: Event = DONE
    """Done when its last use is over. A fetch waits for it; whoever writes to the memory otherwise waits first."""


class Tier:
    """A place to offload to, of one rank. This one is the host's memory: pinned beside a GPU, and beside a CPU memory
    apart, so that the same code runs.

    Args:
        device: what windows are memory of.
    """

    name: ClassVar[str] = "cpu"
    """As in the settings."""
    placed_nbytes = 0
    """Bytes of all places."""
    fetched_nbytes = 0
    """Bytes of all fetches so far."""
    stored_nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self._device = device, device_of(device)
        self._reading, self._writing = self._device.stream(), self._device.stream()

    @property
    def where(self) -> str:
        """In words, for the user."""
        return "host memory apart" if self._device.is_host else "pinned host memory"

    def place(self, nbytes: int) -> Place:
        """Room for so many bytes, above 0, rounded up to whole pages.

        Raises:
            OffloadError: there is none.
        """
        place = Place(self._device.host_bytes(whole_pages(nbytes)))
        self.placed_nbytes += place.nbytes
        return place

    def free(self, place: Place) -> None:
        """End the use of a place: nothing of it is under way."""
        self.placed_nbytes -= place.nbytes

    def window(self, nbytes: int) -> Window:
        """A new window of so many bytes, whole pages."""
        return Window(self._device.bytes_for(nbytes, self._reading, self._writing))

    def fetch(self, place: Place, window: Window, stored: Event = DONE) -> Event:
        """Begin to bring a place's bytes, as soon as they are `stored` there, into a window that is as large or
        larger."""
        self.fetched_nbytes += place.nbytes
        unused, window.unused = window.unused, DONE
        return self._fetch(place, window, stored, unused)

    def fetched(self, place: Place, stored: Event) -> tuple[torch.Tensor, Event]:
        """Begin to bring a place's bytes, as soon as they are `stored` there, into memory of their own: (nbytes,) uint8
        on the device, to be kept until the transfer was waited for."""
        self.fetched_nbytes += place.nbytes
        window = self._unwaited_window(place.nbytes)
        return window.memory, self._fetch(place, window, stored, self.read())

    def store(self, window: Window, place: Place) -> Event:
        """Begin to bring a window's bytes, as the device has them when its work until now is done, to a place."""
        self.stored_nbytes += place.nbytes
        return self._store(window, place)

    def _fetch(self, place: Place, window: Window, stored: Event, unused: Event) -> Event:
        """Fetch when both are done; with the second the window's memory is not used any more."""
        return self._reading.copy(window.memory[: place.nbytes], place.memory, events=(stored, unused))

    def _unwaited_window(self, nbytes: int) -> Window:
        """A new window, whose memory the device may still use for what it has been told until now."""
        return Window(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def _store(self, window: Window, place: Place) -> Event:
        return self._writing.copy(place.memory, window.memory[: place.nbytes], events=(self.read(),))

    def read(self) -> Event:
        """Done when what the device has been told until now is done: a window that it reads may then be used again."""
        return self._device.event()

    def settled(self, event: Event) -> Event:
        """Prepare to use memory again after a transfer of this tier: returns the event for the device to wait for
        before. A tier whose threads write to windows waits here, on the host, and returns `DONE`.

        Raises:
            OffloadError: the bytes did not get there.
        """
        return event

    def look(self, place: Place, start: int, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8: some of the bytes at rest, for a host that only reads; on any thread.

        Raises:
            OffloadError: they cannot be read.
        """
        return place.memory[start : start + nbytes]

    def forget(self, place: Place) -> None:
        """The host has looked at a place's memory, and does not need it any more."""


# The way of gradients from a GPU to an optimizer on the host, and of weights back, through pinned memory.
#
# Two buckets deep: while the host updates one, the gradient of the next arrives and the weights of the last leave.


NUM_BUFFERS = 2


class Crossing:
    """One engine's way, for all its buckets.

    Args:
        device: of gradients and weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.stream()
        self._buffers = [_Pinned(self._device) for _ in range(2 * NUM_BUFFERS)]
        self._gradients, self._weights = cycle(self._buffers[:NUM_BUFFERS]), cycle(self._buffers[NUM_BUFFERS:])

    @property
    def placed_nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def bring(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a gradient to the host, beside what the device computes.

        Args:
            gradient: (numel,) of any dtype. The caller leaves it as it is until it has called the result.

        Returns:
            Waits for the copy and gives it. It holds until the second `bring` after this one.
        """
        buffer = next(self._gradients)
        copy = buffer.like(gradient)
        buffer.last_use = self._stream.copy(copy, gradient, events=(self._device.event(),))

        def on_host() -> torch.Tensor:
            buffer.last_use.settle()
            return copy

        return on_host

    def send(self, master: torch.Tensor, weight: torch.Tensor) -> None:
        """Let the device bring `weight` up to date with what `master`, on the host, is now. The host rounds it: 16 bits
        cross as 16 bits."""
        buffer = next(self._weights)
        rounded = buffer.like(weight).copy_(master)
        weight.copy_(rounded, non_blocking=True)
        buffer.last_use = self._device.event()


class _Pinned:
    """A buffer of pinned memory, as large as it was ever needed."""

    def __init__(self, device: Device) -> None:
        self._device, self.memory = device, device.host_bytes(1)
        self.last_use: Event = DONE
        """Done when its last use is over."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """(numel,) of the tensor's dtype, of any values, once the last use is over."""
        self.last_use.settle()
        if self.memory.nbytes < tensor.nbytes:
            self.memory = self._device.host_bytes(tensor.nbytes)
        return self.memory[: tensor.nbytes].view(tensor.dtype)


# How fast a tier is, measured when a run begins.


SAMPLE_NBYTES = 32 * 2**20
"""At most; no more than is offloaded, for a disk that has just room for that, if anything is before a forward."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second of one rank, measured while all others measured theirs."""

    fetched: float
    stored: float


def measured(tier: Tier) -> Rates:
    """Store a sample and fetch it again.

    Raises:
        OffloadError: there is no room for it, or it cannot be written or read.
    """
    nbytes = min(SAMPLE_NBYTES, tier.placed_nbytes or SAMPLE_NBYTES)
    place, window = tier.place(nbytes), tier.window(nbytes)
    try:
        started_s = time.perf_counter()
        tier.store(window, place).settle()
        stored_s = time.perf_counter()
        tier.fetch(place, window).settle()
        fetched_s = time.perf_counter()
    finally:
        tier.free(place)
    return Rates(nbytes / (fetched_s - stored_s), nbytes / (stored_s - started_s))


# Bytes on their way between a disk and a window, as an event.


class OnThreads(Event):
    """Pieces read or written by threads. To wait for them raises OffloadError, where one cannot be."""

    def __init__(self, parts: Sequence["Future[None]"]) -> None:
        self._parts = parts

    def wait(self) -> None:
        # All of them, also behind one that has failed: nobody may write into a window that is used again.
        errors = [error for part in self._parts if (error := part.exception()) is not None]
        self._parts = ()
        if errors:
            raise errors[0]


class OnThreadAndStream(Event):
    """Pieces read by threads, and copied by a stream of a GPU behind them; waited for as `OnThreads`."""

    def __init__(self, copied: "Future[Event]") -> None:
        self._copied = copied

    def wait(self) -> None:
        self._copied.result().wait()

    def settle(self, timeout_s: float | None = None) -> bool:
        return self._copied.result().settle(timeout_s)


# A few windows, used in turn: one is read into, one computed with, one written from.


class Windows:
    """Lends windows on a tier: as many as `num_windows`, or as were ever lent at once.

    Args:
        num_windows: that are made before one is lent again whose last copy may be under way.
    """

    def __init__(self, tier: Tier, num_windows: int = 3) -> None:
        self.tier, self._num_windows = tier, num_windows
        self._resting: list[tuple[Window, Event]] = []
        """Those not lent, each with the last that was begun with it; the oldest first."""
        self._num_lent = 0

    @property
    def memories(self) -> list[torch.Tensor]:
        """The memory of the windows at rest."""
        return [window.memory for window, _ in self._resting]

    def take(self, nbytes: int) -> Window:
        """A window of at least so many bytes, whole pages: see `Window.unused`. All become as large as the largest ever
        asked for.

        Raises:
            OffloadError: what was written from it did not arrive.
        """
        self._num_lent += 1
        if self._num_lent + len(self._resting) > self._num_windows and self._resting:
            window, transfer = self._resting.pop(0)
            if window.memory.nbytes >= nbytes:
                window.unused = self.tier.settled(transfer)
                return window
            transfer.settle()
            del window  # its memory may serve the larger one
        return self.tier.window(nbytes)

    def give_back(self, window: Window, transfer: Event) -> None:
        """End a loan; `transfer` was the last to be begun with the window."""
        self._num_lent -= 1
        self._resting.append((window, transfer))
