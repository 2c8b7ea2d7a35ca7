"""The kind of a device, decided here alone."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from zerotrain.device.cpu import Cpu
from zerotrain.device.cuda import Cuda
from zerotrain.device.device import Device
from zerotrain.device.nowhere import Nowhere

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@cache
def device_of(device: torch.device) -> Device:
    """The same device as one that can be asked; every other device than a GPU is asked as the CPU is."""
    return {"cuda": Cuda, "meta": Nowhere}.get(device.type, Cpu)(device)


def num_gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus() -> list[str]:
    """The names of the GPUs that this process may use, as `only_gpus` takes them."""
    given = os.environ.get(_VISIBLE)
    names = [str(number) for number in range(num_gpus())] if given is None else given.split(",")
    return names[: num_gpus()]


@contextmanager
def only_gpus(names: Sequence[str]) -> Iterator[None]:
    """Inside, this process, if it has used no GPU yet, and those that it starts see these alone."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ",".join(names)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def is_gpu_in_use() -> bool:
    """Whether this process has used a GPU, so that none that is forked from it can."""
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
