"""Questions to a device. Each kind of device answers them in its own way."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import torch

from zerotrain.device.memory import files_nbytes, most_nbytes

lies_on_host = attrgetter("is_cpu")
"""Tells of a tensor whether the host reads it as it is, without waiting for a device. No frame of Python."""


class Event:
    """Work of a device. This one is done as soon as it is made."""

    def wait(self) -> None:
        """Let this thread's later work on the device find the work done."""

    def is_done(self) -> bool:
        """Whether it is done now."""
        return True

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait on the host until the work is done; its source may be used again. False: it was not done in time."""
        self.wait()
        return True


DONE = Event()


class Stream:
    """An order of work on a device, beside that of its computing. This one does each call at once."""

    def current(self) -> AbstractContextManager[object]:
        """In here this thread tells the device its work in this order."""
        return nullcontext()

    def wait(self, event: Event) -> None:
        """Let later work in this order find the work of an event of the same device done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, events: Sequence[Event] = ()) -> Event:
        """Begin to copy once the events are done."""
        target.copy_(source)
        return DONE


class Graph(ABC):
    """Work of a device, told once and recorded, then told as a whole: the same operations on the same memory."""

    @abstractmethod
    def recording(self) -> AbstractContextManager[object]:
        """In here what this thread tells the graph's stream is recorded, and not done. The host must ask the device for
        nothing meanwhile, and wait for nothing."""

    @abstractmethod
    def replay(self) -> None:
        """Tell the current stream all of it."""


class MemoryHistory:
    """The allocations of all GPUs of this process since `begin`."""

    def begin(self) -> None:
        """Note allocations from now on."""
        torch.cuda.memory._record_memory_history()

    def write(self, path: Path) -> None:
        """Write a snapshot for pytorch.org/memory_viz, and note no more."""
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)


class Device:
    """One device, and what differs from kind to kind. This kind is the processors of this machine, which have done a
    piece of work when they are told the next.

    Args:
        device: as torch knows it.
    """

    backend: ClassVar[str] = "gloo"
    """The backend of torch.distributed for ranks on such devices."""
    is_host: ClassVar[bool] = True
    """Whether it computes in the host's memory, and has done a piece of work when it is told the next."""
    holds_values: ClassVar[bool] = True
    """False for one without memory, where a step is only rehearsed."""
    peak_of: ClassVar[str] = "the whole process without libraries"
    """Subject of `peak_nbytes`, in words."""
    activities: ClassVar[tuple[torch.profiler.ProfilerActivity, ...]] = (torch.profiler.ProfilerActivity.CPU,)
    """Recorded by torch's profiler."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Its name, for the user."""
        return f"CPU, threads of each: {torch.get_num_threads()}"

    @property
    def multiplies_fp8(self) -> bool:
        """Whether it multiplies matrices in 8 bits, or emulates that."""
        return True

    @property
    def own_nbytes(self) -> int:
        """Size of its memory beside the host's."""
        return 0

    @property
    def kernels_nbytes(self) -> int:
        """Bytes of kernels' workspaces. Torch counts them among its tensors."""
        return 0

    def peak_nbytes(self) -> int:
        """Most bytes held at once."""
        return most_nbytes() - files_nbytes()

    def reserved_nbytes(self) -> int:
        """Most bytes of the device in torch's hands at once, for tensors and in holes between them; 0 if torch keeps
        none in reserve."""
        return 0

    @property
    def is_current(self) -> bool:
        """Whether torch takes this device in this thread if none is named."""
        return True

    def use(self) -> None:
        """Let torch take this device if none is named."""

    def event(self) -> Event:
        """Done when the device has done this thread's work until now."""
        return DONE

    def stream(self) -> Stream:
        """A new stream."""
        return Stream()

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8, of any values, on the host, for copies to and from the device beside its work.

        Args:
            nbytes: above 0.
        """
        return mapped_bytes(nbytes)

    def bytes_for(self, nbytes: int, *streams: Stream) -> torch.Tensor:
        """(nbytes,) uint8 on the device, for the use of these streams from now on: when it is freed, nobody gets it
        before they have done what they were told."""
        return self.host_bytes(nbytes)

    @property
    def is_autocast(self) -> bool:
        """Whether torch's autocast is on for this kind of device."""
        return torch.is_autocast_enabled(self.device.type)

    def graph(self, stream: Stream, beside: Graph | None = None) -> Graph | None:
        """A new graph, to be recorded and replayed on a stream; None: this kind of device has none.

        Args:
            beside: another of the same stream, to share memory with: the two are replayed in the order they are
                recorded in.
        """
        return None

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """In here each wait of the host for this device is noted, in words."""
        yield []

    @property
    def generator(self) -> torch.Generator:
        """Draws the random numbers of tensors on this device."""
        return torch.default_generator

    def keep_generators(self) -> AbstractContextManager[None]:
        """Draws of random numbers in here change no later draw."""
        return torch.random.fork_rng([])

    def memory_history(self) -> MemoryHistory | None:
        """The recording of its allocations; None: torch does not record them."""
        return None


def mapped_bytes(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8, of any values, from the start of a page, as direct reads and writes of a disk need it.

    Args:
        nbytes: above 0.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
