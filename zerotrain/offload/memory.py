"""Host memory that a disk and a GPU can be given directly: it begins on a page."""

import mmap

import torch

PAGE_NBYTES = 4096
"""Borders that direct reads and writes of any disk keep to."""


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that hold so many."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """(nbytes,) uint8, of any values.

    Args:
        nbytes: above 0.
        pinned: for copies from and to a GPU beside its work.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
