"""A rank's message when a collective fails: its name, how long it waited, and where the other ranks failed.

A successful step pays nothing for this. When its collective fails, a rank writes its place into the store of the
meeting, and reads there for a short while what the others write.
"""

import errno
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.errors import CommError

# Errors of this rank and its device, and those of other ranks, in a collective.


_OF_OWN_DEVICE = ("CUDA error", "Cuda failure", "unhandled cuda error")
"""CUDA tells an error of earlier work at any next call: also as torch's RuntimeError without a class,
and NCCL as its own (`ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'`)."""
_WORDS_OF_GLOO = ("gloo", "connection", "timed out", "timeout", "socket", "peer")
"""Gloo raises plain RuntimeErrors; their messages have at least one of these words."""


def is_of_others(error: BaseException) -> bool:
    """Whether a collective's error tells of other ranks, and not of this one's memory, device or arguments.

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


# The system's limits for one process (open files, threads, memory), and the signs of a limit reached.


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
    """The remedy for a shortage of some resource, if an error tells of one; else an empty text. Gloo names the resource
    in the text of a RuntimeError, beside words for lost peers.
    """
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENOMEM):
            return _remedies()[os.strerror(error.errno)]
        return ""
    if not isinstance(error, RuntimeError):
        return ""
    return next((remedy for sign, remedy in _remedies().items() if sign in str(error)), "")


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


# A time limit for a call without one of its own.


T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Make a call in a thread of its own; returns its result, within a time limit.

    Torch's own limits do not serve: a store takes twice its timeout if nobody listens, and waits for ever for a silent
    listener, or where a cable was pulled; a gloo group's first timeout stays the one of its sends and receives (torch
    2.13), and nothing bounds how NCCL makes a communicator.

    Raises:
        TimeoutError: it has not returned. The thread goes on with it, and ends with the process.
        RuntimeError: of the call itself, or there is no thread.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="zerotrain within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised.pop()
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned.pop()


GRACE_S = 2.0
"""How long a rank waits for the other ranks' words after a failed collective. Ranks in different places, each waiting
for the other, time out almost together."""
_STORE_S = 1.0
"""How much longer a store may take to answer."""
_POLL_S = 0.05
_TIME_IS_UP = re.compile(r"time[d -]*out", re.IGNORECASE)
"""In what backends raise when they have waited, and not lost a connection."""
_WHERE_IN_GLOO = re.compile(r"^\[[^\]]*\] ?")


def by_rank(values: Sequence[object]) -> str:
    """Each value and its ranks, such as "2 on ranks 0, 2, 1 on rank 1"."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    texts = ((f"{value:.12g}" if isinstance(value, float) else str(value), on) for value, on in ranks.items())
    return ", ".join(f"{text} on {name_ranks(on)}" for text, on in texts)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks as a person calls them, such as "ranks 0, 2", or "n1 (ranks 2, 3), rank 5 on n2"; nothing for none.

    Args:
        hosts: the name of each rank's host, by rank; none where there is one host.
    """
    if not hosts:
        if not ranks:
            return ""
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        of_host = [rank for rank in ranks if hosts[rank] == host]
        is_whole = len(of_host) == hosts.count(host)
        parts.append(f"{host} ({name_ranks(of_host)})" if is_whole else f"{name_ranks(of_host)} on {host}")
    return ", ".join(parts)


def first_line(error: BaseException) -> str:
    """The first line of a backend's error, without the place in its source and its call stack."""
    return _WHERE_IN_GLOO.sub("", str(error).split("\n")[0])


def _outside() -> str:
    return "outside the engine's calls"


@dataclass
class Whereabouts:
    """This rank and its place in the training, for errors."""

    rank: int
    size: int
    group_name: str = ""
    """Name of the process group: it keeps apart the words that groups leave in the store."""
    describe: Callable[[], str] = _outside
    """Such as "step 3, forward". Called when something has failed."""
    hosts: Sequence[str] = ()
    """The name of each rank's host, by rank; none where all are on one."""
    _lost: CommError | None = field(default=None, init=False)
    _store_answers: bool = field(default=True, init=False)

    def ask(self, describe: Callable[[], str]) -> None:
        """Describe this rank by a method from now on, as long as its object lives.

        Weak: the object knows this rank's process groups. In a circle with them it would keep the groups alive until
        the interpreter shuts down, when gloo's threads still run: a rank that had finished died of SIGABRT.
        """
        method = weakref.WeakMethod(describe)

        def ask_if_alive() -> str:
            alive = method()
            return _outside() if alive is None else alive()

        self.describe = ask_if_alive

    @contextmanager
    def blame_others(self, collective: str) -> Iterator[None]:
        """Make a collective in here, such as "gather of blocks.0".

        Raises:
            CommError: other ranks are gone, or did not come.
            RuntimeError: its own error, of which no other rank is to blame: no memory, a fault of the device.
        """
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.blame(error, collective, time.monotonic() - started_s)

    def blame(self, error: RuntimeError, collective: str, waited_s: float) -> NoReturn:
        """Raise what a collective's error means, as `blame_others` says."""
        if not is_of_others(error):
            raise error
        raise self.lost_others(error, collective, waited_s) from error

    def lost_others(self, error: RuntimeError, collective: str, waited_s: float) -> CommError:
        """The error to raise if the backend has timed out or lost its connection.

        A group fails again at each call after its first failure, such as those of a clean-up: the first error is raised
        again. `collective` is such as "gather of blocks.0".
        """
        if self._lost is not None:
            return self._lost
        where = f"{collective} ({self.describe()})"
        if lacking := shortage(error):
            message = f"rank {self.rank} failed in {where}: {first_line(error)}; {lacking}"
            self._lost = CommError(message, where=where, waited_s=waited_s, is_own=True)
            return self._lost
        reason = first_line(error)
        in_time, failed_s = not _TIME_IS_UP.search(reason), time.monotonic()
        heard = self._exchange_words("failed", where, GRACE_S)
        if not self._store_answers and not in_time:  # who is cut off from it lets those who are not tell it first
            time.sleep(max(0.0, failed_s + GRACE_S + _STORE_S - time.monotonic()))
        message = f"rank {self.rank} failed in {where} after {waited_s:.1f} s: {reason}"
        self._lost = self._missing(message, where, waited_s, heard, in_time=in_time)
        return self._lost

    def overdue(self, where: str, waited_s: float, grace_s: float) -> CommError:
        """The error to tell of an endless collective. `where` is such as "gather of blocks.0 (step 3,
        forward)"; so long, `grace_s`, others may take to come to the same."""
        heard = self._exchange_words("overdue", where, grace_s)
        message = f"rank {self.rank} has waited {waited_s:.1f} s in {where}"
        return self._missing(message, where, waited_s, heard, in_time=False)

    def take_back(self) -> None:
        """The overdue collective has ended: leave the other ranks no word of it."""
        with suppress(RuntimeError, ValueError):
            self._words("overdue").delete_key(str(self.rank))

    def _missing(self, message: str, where: str, waited_s: float, heard: dict[int, str], *, in_time: bool) -> CommError:
        """An error with all that is known of each other rank."""
        lines = [f"rank {rank} failed in {place}" for rank, place in sorted(heard.items())]
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in heard]
        if silent:
            lines.append(f"no answer from {name_ranks(silent, self.hosts)}, which may compute, sleep or be gone")
        if not self._store_answers:
            lines.append("no answer from the store in which the ranks have met")
            # Those of this host could say no more than this one.
            silent = [rank for rank in silent if not self.hosts or self.hosts[rank] != self.hosts[self.rank]]
        return CommError(
            f"{message}; {'; '.join(lines)}. All ranks must make the same calls in the same order",
            unheard=() if in_time else tuple(silent),
            where=where,
            waited_s=waited_s,
        )

    def _words(self, subject: str) -> dist.Store:
        return dist.PrefixStore(f"zerotrain/{subject}/{self.group_name}", _get_default_store())

    def _exchange_words(self, subject: str, where: str, grace_s: float) -> dict[int, str]:
        """Leave `where` for the other ranks; return what they have left, or leave within the grace."""
        heard: dict[int, str] = {}

        def exchange() -> None:
            store = self._words(subject)
            store.set(str(self.rank), where)
            deadline = time.monotonic() + grace_s
            while len(heard) < self.size - 1 and time.monotonic() < deadline:
                for rank in set(range(self.size)) - {self.rank} - set(heard):
                    if store.check([str(rank)]):
                        heard[rank] = store.get(str(rank)).decode(errors="replace")
                time.sleep(_POLL_S)

        # With a cable pulled the store's answer is waited for until TCP gives up, a quarter of an hour (2026-11-24).
        try:
            within(grace_s + _STORE_S, exchange)
        except (TimeoutError, RuntimeError, ValueError):  # or it has gone with the rank that kept it
            self._store_answers = False
        return dict(heard)
