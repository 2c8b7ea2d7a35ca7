"""A GPU, in the calls of torch.cuda and nothing more."""

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from zerotrain.device.device import Device, Event, MemoryHistory, Stream

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NBYTES_OF_HOPPER, _NBYTES = 32 * 2**20, 2 * 4096 * 1024 + 8 * 16 * 1024
"""Torch's defaults, of Hopper and later, and before."""


class Cuda(Device):
    """A GPU that torch.cuda drives."""

    backend = "nccl"
    is_host = False
    peak_of = "tensors on the GPU"
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def own_nbytes(self) -> int:
        nbytes: int = torch.cuda.get_device_properties(self.device).total_memory
        return nbytes

    @property
    def kernels_nbytes(self) -> int:
        """The workspaces of cuBLAS, one for the thread of the forward and one for that of the backward."""
        if _WORKSPACE in os.environ:
            pairs = re.findall(r":(\d+):(\d+)", os.environ[_WORKSPACE])  # KiB, and how many
            return 2 * sum(1024 * int(kib) * int(number) for kib, number in pairs)
        return 2 * (_NBYTES_OF_HOPPER if torch.cuda.get_device_capability(self.device) >= (9, 0) else _NBYTES)

    def peak_nbytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reserved_nbytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    @property
    def is_current(self) -> bool:
        return self.device.index in (None, torch.cuda.current_device())

    def use(self) -> None:
        torch.cuda.set_device(self.device)

    def event(self) -> Event:
        return _Recorded(torch.cuda.current_stream(self.device))

    def stream(self) -> Stream:
        return _Stream(torch.cuda.Stream(self.device))

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def bytes_for(self, nbytes: int, *streams: Stream) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # which may still use what the memory was before
        for stream in streams:
            assert isinstance(stream, _Stream)
            memory.record_stream(stream.of_torch)
        return memory

    @property
    def generator(self) -> torch.Generator:
        index = self.device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

    def keep_generators(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self.device])

    def memory_history(self) -> MemoryHistory:
        return _MemoryHistory()


class _Recorded(Event):
    """The end of what a stream has been told until now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.of_torch = torch.cuda.Event()
        self.of_torch.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.of_torch)

    def is_done(self) -> bool:
        return self.of_torch.query()

    def settle(self) -> None:
        self.of_torch.synchronize()


class _Stream(Stream):
    """A stream of torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.of_torch = stream

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.of_torch)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Recorded)
        self.of_torch.wait_event(event.of_torch)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        with torch.cuda.stream(self.of_torch):
            for each in after:
                each.wait()
            target.copy_(source, non_blocking=True)
        return _Recorded(self.of_torch)


class _MemoryHistory(MemoryHistory):
    def begin(self) -> None:
        torch.cuda.memory._record_memory_history()

    def write(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
