"""The kind of a device, decided here alone."""

from functools import cache

import torch

from zerotrain.device.cpu import Cpu
from zerotrain.device.cuda import Cuda
from zerotrain.device.device import Device
from zerotrain.device.nowhere import Nowhere


@cache
def device_of(device: torch.device) -> Device:
    """The same device as one that can be asked; every other device than a GPU is asked as the CPU is."""
    return {"cuda": Cuda, "meta": Nowhere}.get(device.type, Cpu)(device)


def num_gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_gpu_in_use() -> bool:
    """Whether this process has used a GPU, so that none that is forked from it can."""
    return torch.cuda.is_initialized()
