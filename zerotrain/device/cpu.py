"""The CPU, which has done a piece of work when it is told the next."""

import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zerotrain.device.device import DONE, Device, Event, Stream

OPENBLAS = "OPENBLAS_NUM_THREADS"
"""Read when a library that has OpenBLAS is imported, which then starts so many threads."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes with one thread, and so does the linear algebra of a library that is imported meanwhile,
    as scipy's with transformers: more would stay, and a process with threads cannot be forked."""
    before, said = torch.get_num_threads(), os.environ.get(OPENBLAS)
    torch.set_num_threads(1)
    os.environ.setdefault(OPENBLAS, "1")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if said is None:
            os.environ.pop(OPENBLAS, None)


class Cpu(Device):
    """The processors of this machine."""

    backend = "gloo"
    is_host = True
    peak_of = "the whole process"
    activities = (torch.profiler.ProfilerActivity.CPU,)

    @property
    def name(self) -> str:
        return f"CPU, threads of each: {torch.get_num_threads()}"

    @property
    def own_nbytes(self) -> int:
        return 0

    def peak_nbytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB

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
