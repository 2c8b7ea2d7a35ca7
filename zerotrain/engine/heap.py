"""How glibc's allocator deals with what a training step frees."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
_LARGEST_IN_HEAP_NBYTES = 2**25
_FREE_AT_TOP_NBYTES = 2**27
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def reuse_what_is_freed() -> None:
    """Let this process keep up to 128 MiB that it has freed for its next step, unless the user has set what glibc does.

    By itself glibc comes to 32 MiB for a block and 64 MiB in all, once such a block was freed. Before, it gives the
    logits and the largest gradients back to the system in each step and gets zeroed pages for them in the next: at
    stage 2 7,700 page faults and 40 ms of system time in a step of 350 ms, with it 20 and 10 (GPT of 13.9 M parameters,
    2026-11-22); the peak is the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere is glibc
    if mallopt is None or any(name in os.environ for name in _OF_THE_USER):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_NBYTES)
    mallopt(_TRIM_THRESHOLD, _FREE_AT_TOP_NBYTES)
