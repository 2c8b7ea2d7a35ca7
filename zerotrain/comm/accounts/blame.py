"""Tells errors of this rank and its device from those of other ranks, in a collective."""

import torch
import torch.distributed as dist

_OF_OWN_DEVICE = ("CUDA error", "Cuda failure", "unhandled cuda error")
"""CUDA tells an error of earlier work at the next call, whatever that is: also as torch's RuntimeError without a class,
and NCCL as its own (`ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'`)."""
_WORDS_OF_GLOO = ("gloo", "connection", "timed out", "timeout", "socket", "peer")
"""Gloo raises plain RuntimeErrors; their messages have at least one of these words."""


def is_of_others(error: BaseException) -> bool:
    """Whether an error that a collective raised tells of other ranks, and not of this one's memory, device or
    arguments.

    By its class first. Words count only where there is no class: `cudaErrorLaunchTimeout` and `peer access` have those
    of a lost rank too.
    """
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return False
    if any(words in str(error) for words in _OF_OWN_DEVICE):
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _WORDS_OF_GLOO)
