"""The memory of this process, and the one choice about it: how much of what is freed glibc's allocator keeps."""

import ctypes
import os
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_REUSED_NBYTES, _RETURNED_NBYTES = 2**24, 2**22
"""Larger blocks get pages of their own, and give them back when they are freed. With 32 MiB for the first, places of
logits of 31 MB stayed between others: a rank held up to 307 MiB beside its tensors, with 16 MiB 15 to 95
(2026-11-27)."""
_SET_BY_USER = any(
    name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
)
KEPT_NBYTES = 2**27
"""Bytes to allow a process beside its tensors: kept memory of freed ones, and growth in its first steps."""


def set_heap(*, returns: bool = False) -> None:
    """Let glibc keep freed memory for the next step, unless the user has set what glibc does.

    By itself glibc gives logits and large gradients back to the system in each step and gets zeroed pages for them in
    the next: at stage 2 7,700 page faults and 40 ms of system time in a step of 350 ms, with this 470 and 20 (GPT of
    13.9 M parameters, 2026-11-22).

    Args:
        returns: blocks of 4 MiB or more go back to the system, so that the memory of a run with a disk stays flat; a
            step of 1.0 s takes 1.1 (GPT of 27.4 M parameters, stage 1, 2026-11-26).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None and not _SET_BY_USER:
        mallopt(_TRIM_THRESHOLD, 2**17 if returns else KEPT_NBYTES)
        mallopt(_MMAP_THRESHOLD, _RETURNED_NBYTES if returns else _REUSED_NBYTES)


def give_back_freed() -> None:
    """Let malloc give all freed memory back to the system. Otherwise freed large blocks stay between small
    ones, and later ones do not fit in their place: measured, without this a process grew by what the whole model takes,
    though no more than a bucket of it was ever held, and by all that had gone to a disk."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc alone has it
        libc.malloc_trim(0)


def own_nbytes() -> int:
    """Bytes of this process's memory, without files, such as torch's libraries: the processes of a machine
    share them, and the system may drop them and read them again. Elsewhere than on Linux with them."""
    if sys.platform != "linux":
        return most_nbytes()
    return sum(_status_nbytes("RssAnon", "RssShmem"))


def most_nbytes() -> int:
    """Bytes of this process in memory at most, with files. Not ru_maxrss on Linux: a program begins with that of its
    parent process."""
    if sys.platform == "linux":
        return _status_nbytes("VmHWM")[0]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # macOS counts bytes


def files_nbytes() -> int:
    """Bytes of this process's files in memory; 0 elsewhere than on Linux."""
    return 0 if sys.platform != "linux" else _status_nbytes("RssFile")[0]


def _status_nbytes(*names: str) -> list[int]:
    with open("/proc/self/status", encoding="ascii") as file:
        values = dict(line.split(":", 1) for line in file)
    return [1024 * int(values[name].split()[0]) for name in names]
