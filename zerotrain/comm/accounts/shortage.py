"""The system's limits for one process (open files, threads, memory), and how to tell that one was reached."""

import errno
import os
import resource
from contextlib import suppress

_FILES_TO_MEET = 13
_FILES_FOR_EACH_RANK = 2
_FILES_OF_A_STORE = 3
"""And one for each rank. Counted with 2 and 3 ranks (torch 2.13): with fewer, threads of gloo end the process."""
_FILES_AT_START = 6
"""Open in a rank of the launcher before it meets the others."""
_ENOUGH = "ulimit -n 1024"


def files_problem(num_ranks: int, num_open: int = _FILES_AT_START, *, at_rank_0: bool = False) -> str:
    """Why a process cannot meet so many ranks; nothing where it can.

    Args:
        num_open: the files that it has open.
        at_rank_0: whether rank 0 keeps the store in which the ranks meet, with a connection to each. Then all are to
            have as many as it: the others would wait for it.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = num_open + _FILES_TO_MEET + _FILES_FOR_EACH_RANK * num_ranks
    if at_rank_0:
        needed += _FILES_OF_A_STORE + num_ranks
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return ""
    return f"a process may open {allowed} files here, and each rank needs {needed}; raise it: {_ENOUGH}"


def num_open_files() -> int:
    """Number of this process's open files; where the system does not tell it, that at the start of a rank."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd")) - 1  # that which lists them
    return _FILES_AT_START


def shortage(error: BaseException) -> str:
    """The resource that ran out, and the remedy, if an error tells of a shortage; else an empty text. Gloo names the
    resource in the text of a RuntimeError, beside words that it also uses for lost peers.
    """
    if isinstance(error, OSError):
        return _remedies().get(os.strerror(error.errno or 0), "") if error.errno in _ERRNOS else ""
    if not isinstance(error, RuntimeError):
        return ""
    return next((remedy for sign, remedy in _remedies().items() if sign in str(error)), "")


_ERRNOS = (errno.EMFILE, errno.ENOMEM)


def _remedies() -> dict[str, str]:
    files = f"this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files; raise it: {_ENOUGH}"
    threads = "this process gets no more threads; raise ulimit -u, ulimit -v or the limit of its container (pids)"
    memory = "this process gets no more memory; raise ulimit -v, or give the ranks less to do"
    return {
        os.strerror(errno.EMFILE): files,
        "can't start new thread": threads,
        os.strerror(errno.EAGAIN): threads,
        os.strerror(errno.ENOMEM): memory,
        "can't allocate memory": memory,
        "shared memory(shm)": "/dev/shm is full; enlarge it (docker run --shm-size=8g), or set data.num_workers=0",
    }
