"""The CPU, which has done a piece of work when it is told the next."""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zerotrain.device.device import DONE, Device, Event, Stream
from zerotrain.device.heap import files_nbytes, most_nbytes


class Cpu(Device):
    """The processors of this machine."""

    backend = "gloo"
    is_host = True
    peak_of = "the whole process without libraries"
    activities = (torch.profiler.ProfilerActivity.CPU,)

    @property
    def name(self) -> str:
        return f"CPU, threads of each: {torch.get_num_threads()}"

    @property
    def own_nbytes(self) -> int:
        return 0

    def peak_nbytes(self) -> int:
        return most_nbytes() - files_nbytes()

    @property
    def is_current(self) -> bool:
        return True

    def use(self) -> None:
        pass

    def event(self) -> Event:
        return DONE

    def stream(self) -> Stream:
        return _AtOnce()

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return mapped_bytes(nbytes)

    def bytes_for(self, nbytes: int, *streams: Stream) -> torch.Tensor:
        return mapped_bytes(nbytes)

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def keep_generators(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([])


class _AtOnce(Stream):
    """A stream that does what it is told at once."""

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, event: Event) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        target.copy_(source)
        return DONE


def mapped_bytes(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8, of any values, that begin on a page, as direct reads and writes of a disk need it.

    Args:
        nbytes: above 0.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
