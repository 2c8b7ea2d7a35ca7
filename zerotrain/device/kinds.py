"""The kinds of devices, told apart here alone: a CPU, a GPU, and a plan's device without memory."""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from zerotrain.device.device import Device, Event, Graph, MemoryHistory, Stream

# A GPU, in the calls of torch.cuda and nothing more.


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NBYTES_OF_HOPPER, _NBYTES = 32 * 2**20, 2 * 4096 * 1024 + 8 * 16 * 1024
"""Torch's defaults, of Hopper and later, and before."""
_POLL_S = 1e-4
"""Between two looks at an event that is waited for within a time limit."""


class Cuda(Device):
    """A GPU, driven by torch.cuda."""

    backend = "nccl"
    is_host = False
    peak_of = "tensors on the GPU"
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def multiplies_fp8(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= (8, 9)

    @property
    def own_nbytes(self) -> int:
        nbytes: int = torch.cuda.get_device_properties(self.device).total_memory
        return nbytes

    @property
    def kernels_nbytes(self) -> int:
        """The workspaces of cuBLAS, one each for the threads of the forward and the backward."""
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

    def graph(self, stream: Stream, beside: Graph | None = None) -> Graph:
        assert isinstance(stream, _Stream)
        assert beside is None or isinstance(beside, _Graph)
        return _Graph(stream, beside)

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        waits: list[str] = []
        former = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(former)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                waits.append(f"at {warning.filename}:{warning.lineno}")
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

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
        return MemoryHistory()


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

    def settle(self, timeout_s: float | None = None) -> bool:
        until_s = time.monotonic() + (timeout_s or 0.0)
        while timeout_s is not None and not self.of_torch.query():
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        self.of_torch.synchronize()
        return True


class _Graph(Graph):
    """A CUDA graph. Other threads may use the GPU while it is recorded: they read batches, or write a checkpoint."""

    def __init__(self, stream: "_Stream", beside: "_Graph | None") -> None:
        self._stream, self._graph = stream, torch.cuda.CUDAGraph()
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool

    def recording(self) -> AbstractContextManager[object]:
        stream = self._stream.of_torch
        return torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")

    def replay(self) -> None:
        self._graph.replay()


class _Stream(Stream):
    """A stream of torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.of_torch = stream

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.of_torch)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Recorded)
        self.of_torch.wait_event(event.of_torch)

    def copy(self, target: torch.Tensor, source: torch.Tensor, events: Sequence[Event] = ()) -> Event:
        with torch.cuda.stream(self.of_torch):
            for event in events:
                event.wait()
            target.copy_(source, non_blocking=True)
        return _Recorded(self.of_torch)


# A device without memory, for the rehearsal of a plan: torch's meta device.


class Nowhere(Device):
    """It answers as a CPU does, and has room for anything."""

    holds_values = False

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


@contextmanager
def rehearsing(*, on_host: bool) -> Iterator[None]:
    """In here it stands for a device in the host's memory, or for one beside it."""
    was_on_host, Nowhere.is_host = Nowhere.is_host, on_host
    try:
        yield
    finally:
        Nowhere.is_host = was_on_host


_VISIBLE = "CUDA_VISIBLE_DEVICES"


@cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch.device. A device of any other kind is asked as the CPU is."""
    return {"cuda": Cuda, "meta": Nowhere}.get(device.type, Device)(device)


def num_gpus() -> int:
    """Number of GPUs for torch here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, as `only_gpus` takes them."""
    variable = os.environ.get(_VISIBLE)
    names = [str(number) for number in range(num_gpus())] if variable is None else variable.split(",")
    return names[: num_gpus()]


@contextmanager
def only_gpus(names: Sequence[str]) -> Iterator[None]:
    """Inside, this process, if it has used no GPU yet, and its children see these alone."""
    variable = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ",".join(names)
    try:
        yield
    finally:
        if variable is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = variable


def is_gpu_in_use() -> bool:
    """Whether this process has used a GPU. Then no process forked from it can."""
    return torch.cuda.is_initialized()


def seed_torch(number: int) -> None:
    """Seed torch's generators as `torch.manual_seed` does. That one takes 0.1 to 0.8 ms: it formats the stack for each
    kind of device that may still come."""
    if torch.accelerator.is_available() and not torch.cuda.is_initialized():
        torch.manual_seed(number)  # for the devices that this process will use
        return
    torch.default_generator.manual_seed(number)
    for generator in torch.cuda.default_generators:  # none before a GPU is used
        generator.manual_seed(number)


# Results of a device, read by the host.


def reading(values: torch.Tensor, timeout_s: float | None = None) -> Callable[[], Any]:
    """Begin to bring small values to the host; the result waits until they are there and gives them as `tolist` does.

    It waits for what the device was told before, and for nothing that it was told since: `tolist` itself would wait for
    that too, and leave the device without work.

    Args:
        timeout_s: the result raises RuntimeError where they have not come by then; None: it waits for ever.
    """
    device = device_of(values.device)
    if device.is_host:
        return values.tolist
    on_host = device.host_bytes(values.nbytes).view(values.dtype).view(values.shape)
    on_host.copy_(values, non_blocking=True)
    arrived = device.event()

    def read() -> Any:
        if not arrived.settle(timeout_s):
            raise RuntimeError(f"timed out: the device has not done its work within {timeout_s:g} s")
        return on_host.tolist()

    return read
