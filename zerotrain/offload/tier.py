"""Interface of a place to offload to: reserve room, fetch into a window, store from it. Host memory implements it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from zerotrain.device.device import DONE, Event
from zerotrain.device.kinds import device_of
from zerotrain.offload.memory import whole_pages


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
    """On the host, for a disk and a GPU, which do not reach each other."""
    unused: Event = DONE
    """Done when its last use is over. A fetch waits for it; whoever writes to the memory otherwise waits first."""


class Tier(ABC):
    """A place to offload to, of one rank.

    Args:
        device: what windows are memory of.
    """

    name: ClassVar[str]
    """As in the settings."""
    placed_nbytes = 0
    """Bytes of all places."""
    fetched_nbytes = 0
    """Bytes of all fetches so far."""
    stored_nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self._device = device, device_of(device)

    @property
    @abstractmethod
    def where(self) -> str:
        """In words, for who starts a run."""

    @abstractmethod
    def place(self, nbytes: int) -> Place:
        """Room for so many bytes, above 0, rounded up to whole pages.

        Raises:
            OffloadError: there is none.
        """

    @abstractmethod
    def free(self, place: Place) -> None:
        """End the use of a place: nothing of it is under way."""

    @abstractmethod
    def window(self, nbytes: int) -> Window:
        """A new window of so many bytes, whole pages."""

    def fetch(self, place: Place, window: Window, stored: Event = DONE) -> Event:
        """Begin to bring a place's bytes, as soon as they are `stored` there, into a window that is as large or
        larger."""
        self.fetched_nbytes += place.nbytes
        unused, window.unused = window.unused, DONE
        return self._fetch(place, window, stored, unused)

    def fetched(self, place: Place, stored: Event) -> tuple[torch.Tensor, Event]:
        """Begin to bring a place's bytes, as soon as they are `stored` there, into memory of their own: (nbytes,) uint8
        on the device, which is not to be let go before the transfer was waited for."""
        self.fetched_nbytes += place.nbytes
        window = self._unwaited_window(place.nbytes)
        return window.memory, self._fetch(place, window, stored, self.read())

    def store(self, window: Window, place: Place) -> Event:
        """Begin to bring a window's bytes, as the device has them when its work until now is done, to a place."""
        self.stored_nbytes += place.nbytes
        return self._store(window, place)

    @abstractmethod
    def _fetch(self, place: Place, window: Window, stored: Event, unused: Event) -> Event:
        """Fetch when both are done; with the second the window's memory is not used any more."""

    def _unwaited_window(self, nbytes: int) -> Window:
        """A new window, whose memory the device may still use for what it has been told until now."""
        return Window(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    @abstractmethod
    def _store(self, window: Window, place: Place) -> Event: ...

    def read(self) -> Event:
        """Done when what the device has been told until now is done: a window that it reads may then be used again."""
        return self._device.event()

    @abstractmethod
    def settled(self, event: Event) -> Event:
        """Prepare to use memory again that a transfer of this tier has used: returns the event that the device has to
        wait for before. A tier whose threads write to windows waits here, on the host, and returns `DONE`.

        Raises:
            OffloadError: the bytes did not get there.
        """

    def look(self, place: Place, start: int, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8: some of the bytes at rest, for a host that only reads; on any thread.

        Raises:
            OffloadError: they cannot be read.
        """
        return place.memory[start : start + nbytes]

    def forget(self, place: Place) -> None:  # noqa: B027 -- host memory stays
        """The host has looked at a place's memory, and does not need it any more."""


class HostTier(Tier):
    """The host's memory: pinned beside a GPU, and beside a CPU memory apart, so that the same code runs."""

    name = "cpu"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._reading, self._writing = self._device.stream(), self._device.stream()

    @property
    def where(self) -> str:
        return "host memory apart" if self._device.is_host else "pinned host memory"

    def place(self, nbytes: int) -> Place:
        place = Place(self._device.host_bytes(whole_pages(nbytes)))
        self.placed_nbytes += place.nbytes
        return place

    def free(self, place: Place) -> None:
        self.placed_nbytes -= place.nbytes

    def window(self, nbytes: int) -> Window:
        return Window(self._device.bytes_for(nbytes, self._reading, self._writing))

    def settled(self, event: Event) -> Event:
        return event

    def _fetch(self, place: Place, window: Window, stored: Event, unused: Event) -> Event:
        return self._reading.copy(window.memory[: place.nbytes], place.memory, after=(stored, unused))

    def _store(self, window: Window, place: Place) -> Event:
        return self._writing.copy(place.memory, window.memory[: place.nbytes], after=(self.read(),))
