"""Questions to a device. Each kind of device answers them in its own way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import torch

lies_on_host = attrgetter("is_cpu")
"""Tells of a tensor whether the host reads it as it is, without waiting for a device. No frame of Python."""


class Event:
    """Work of a device. This one is done as soon as it is made."""

    def wait(self) -> None:
        """Let all that this thread tells the device from here on find the work done."""

    def is_done(self) -> bool:
        """Whether it is done now."""
        return True

    def settle(self) -> None:
        """Wait on the host until the work is done; its source may be used again."""
        self.wait()


DONE = Event()


class Stream(ABC):
    """An order of work on a device, beside that of its computing."""

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """In here this thread tells the device its work in this order."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let all that comes later in this order find the work of an event of the same device done."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, events: Sequence[Event] = ()) -> Event:
        """Begin to copy once the events are done."""


class MemoryHistory:
    """The allocations of all GPUs of this process since `begin`."""

    def begin(self) -> None:
        """Note allocations from now on."""
        torch.cuda.memory._record_memory_history()

    def write(self, path: Path) -> None:
        """Write a snapshot for pytorch.org/memory_viz, and note no more."""
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)


class Device(ABC):
    """One device, and what differs from kind to kind.

    Args:
        device: as torch knows it.
    """

    backend: ClassVar[str]
    """The backend of torch.distributed for ranks on such devices."""
    is_host: ClassVar[bool]
    """Whether it computes in the host's memory, and has done a piece of work when it is told the next."""
    holds_values: ClassVar[bool] = True
    """False for one without memory, where a step is only rehearsed."""
    peak_of: ClassVar[str]
    """Subject of `peak_nbytes`, in words."""
    activities: ClassVar[tuple[torch.profiler.ProfilerActivity, ...]]
    """Recorded by torch's profiler."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name, for the user."""

    @property
    @abstractmethod
    def own_nbytes(self) -> int:
        """Size of its memory beside the host's."""

    @property
    def kernels_nbytes(self) -> int:
        """Bytes in which kernels work. Torch counts them among its tensors."""
        return 0

    @abstractmethod
    def peak_nbytes(self) -> int:
        """Most bytes held at once."""

    def reserved_nbytes(self) -> int:
        """Most bytes of the device in torch's hands at once, for tensors and in holes between them; 0 if torch keeps
        none in reserve."""
        return 0

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether torch takes this device in this thread if none is named."""

    @abstractmethod
    def use(self) -> None:
        """Let torch take this device if none is named."""

    @abstractmethod
    def event(self) -> Event:
        """Done when all is done that this thread has told the device until now."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8, of any values, on the host, for copies to and from the device beside its work.

        Args:
            nbytes: above 0.
        """

    @abstractmethod
    def bytes_for(self, nbytes: int, *streams: Stream) -> torch.Tensor:
        """(nbytes,) uint8 on the device, that these streams may use from now on: when it is freed, nobody gets it
        before they have done what they were told."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator:
        """Draws the random numbers of tensors on this device."""

    @abstractmethod
    def keep_generators(self) -> AbstractContextManager[None]:
        """Draws of random numbers in here change no later draw."""

    def memory_history(self) -> MemoryHistory | None:
        """The recording of its allocations; None: torch does not record them."""
        return None
