"""Children of this process, forked to compute beside it and ended with it. There are no threads: a fork loses them.

Imports no torch before it is needed."""

import ctypes
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_OPENBLAS = "OPENBLAS_NUM_THREADS"
_STORE = "pt_tcpstore_uv"
"""The thread of torch's store in rank 0: it serves its sockets, and a child does not use it."""


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Get this signal when the parent process dies, however it dies. Linux only: elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


def may_fork(idle: str = "") -> bool:
    """Whether this is a Linux process of one thread, without a GPU in use: CUDA cannot be used after a fork, and macOS
    ends forked processes for the use of its own libraries.

    Args:
        idle: the name of a thread that may be there.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    for thread in Path("/proc/self/task").iterdir():
        try:
            name = (thread / "comm").read_text().strip()
        except OSError:  # it has ended since
            name = ""
        if thread.name != str(os.getpid()) and name != idle:
            return False
    if "torch" not in sys.modules:
        return True
    from zerotrain.device.kinds import is_gpu_in_use

    return not is_gpu_in_use()


@contextmanager
def no_threads_of_openblas() -> Iterator[None]:
    """The linear algebra of numpy and scipy (OpenBLAS) starts a thread for each core when it is imported, unless
    OPENBLAS_NUM_THREADS says otherwise. Within this it gets none: ranks share the cores, and a process with threads
    cannot be forked."""
    sets_threads = _OPENBLAS not in os.environ
    if sets_threads:
        os.environ[_OPENBLAS] = "1"
    try:
        yield
    finally:
        if sets_threads:
            os.environ.pop(_OPENBLAS, None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes with one thread, and a library that is imported meanwhile, as scipy with transformers,
    leaves none."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with no_threads_of_openblas():
            yield
    finally:
        torch.set_num_threads(num_threads)


def num_cores() -> int:
    """Number of this process's cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def compute_in_child(compute: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Compute in a child of this process, meanwhile; the function that is yielded waits for the value. It computes the
    value here if no child has told it: the child has raised an error, which is raised here then, it was killed, or none
    may be forked.

    Args:
        compute: gives a value that JSON can hold, and prints nothing.
    """
    if not may_fork(idle=_STORE):
        yield compute
        return
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # Python 3.12 warns of the store's thread
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _tell(compute, writer)
    os.close(writer)

    def read_value() -> Any:
        try:
            return json.loads(file.read())
        except ValueError:  # nothing, or a part
            return compute()

    with open(reader, "rb") as file:
        try:
            yield read_value
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _tell(compute: Callable[[], Any], writer: int) -> None:
    """Compute in the child, and end: nothing of the parent's is written or cleaned up here."""
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what Ctrl-C has ended
        answer = json.dumps(compute()).encode()
        with open(writer, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)
