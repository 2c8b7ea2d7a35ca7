"""Memory that was freed, given back to the system."""

import ctypes


def give_back_freed() -> None:
    """Let malloc give the system all that it keeps of freed memory. What is large lies between what is small and stays,
    so that no next one fits in its place: measured, without this a process grew by what the whole model takes, though
    no more than a bucket of it was ever held, and by all that had gone to a disk."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc alone has it
        libc.malloc_trim(0)
