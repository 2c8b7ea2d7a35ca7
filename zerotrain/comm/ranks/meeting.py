"""Where the ranks of a run meet: a store that all of them reach, and the wait there until all have come."""

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from zerotrain.comm.ranks.environment import RankEnvironment, num_restarts
from zerotrain.errors import CommError, ConfigError

REMINDER_S = 10.0
"""A line says who is missing each time so much has passed."""
_POLL_S = 0.05
"""Torch's own waits say something of their own on stderr when their time is up."""
_RANKS_PER_POLL_S = 2000
"""Many ranks ask less often: all ask one store for all."""
_opened: dict[RankEnvironment, dist.Store] = {}
"""The stores of this process. A port can be listened to once."""
_worlds = itertools.count()
"""Meetings of this process. In the same store each has keys of its own: those of the last are still there."""


def open_store(ranks: RankEnvironment, timeout_s: float, *, across_restarts: bool = False) -> dist.Store:
    """The store of this process's ranks: the file it was given, that of torchrun, or one that rank 0 keeps.

    Does not wait for the other ranks, but for the one that keeps the store. Nothing that is read from it is ever
    unpickled: whoever reaches the port of torchrun's store may write to it.

    Args:
        across_restarts: torchrun may start all ranks again, and keeps its store: whether to see what they have left
            there before, or a place of their own.

    Raises:
        ConfigError: the store cannot be kept or used there.
        CommError: nobody keeps it there within the time.
    """
    if ranks not in _opened:
        _opened[ranks] = _open(ranks, timeout_s)
    opened = _opened[ranks]
    opened.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore("zerotrain/kept" if across_restarts else f"zerotrain/{num_restarts()}", opened)


def meet(ranks: RankEnvironment, timeout_s: float) -> dist.Store:
    """Wait until all ranks have come, and return a store for what they do together.

    Raises:
        CommError: some have not come within the time.
        ConfigError: processes were started as the same rank, or of another number of ranks; or as of `open_store`.
    """
    world = dist.PrefixStore(f"world/{next(_worlds)}", open_store(ranks, timeout_s))
    came = dist.PrefixStore("came", world)
    if came.add(f"processes/{ranks.rank}", 1) > 1:
        raise ConfigError(f"RANK: got {ranks.rank}, as which another process was started too; give each its own")
    came.set(str(ranks.rank), str(ranks.world_size))
    await_ranks(came, ranks, range(ranks.world_size), timeout_s)
    # Who was told of more ranks than rank 0 finds all there too.
    size = int(came.get("0"))
    if size != ranks.world_size:
        raise ConfigError(f"WORLD_SIZE: got {ranks.world_size}, and rank 0 got {size}; give all ranks the same")
    return world


def await_ranks(came: dist.Store, ranks: RankEnvironment, awaited: Sequence[int], timeout_s: float) -> None:
    """Wait until the keys of these ranks, their numbers, are in a store. The first rank that is there says every ten
    seconds which are not.

    Raises:
        CommError: some have not come within the time.
    """

    def missing() -> list[int]:
        return [rank for rank in awaited if not came.check([str(rank)])]

    def is_first() -> bool:
        return not any(came.check([str(rank)]) for rank in range(ranks.rank))

    keys = [str(rank) for rank in awaited]
    in_time = _wait(lambda: came.check(keys), lambda: _named(missing()) if is_first() else "", ranks, timeout_s)
    if not in_time and (absent := missing()):
        raise CommError(
            f"{_named(absent)} did not come within {timeout_s:g} s (World.from_environment(timeout_s=...)); start all "
            "ranks, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            unheard=tuple(absent),
            where="the meeting of the ranks",
            waited_s=timeout_s,
        )


def _named(ranks: Sequence[int]) -> str:
    """Nothing where there are none."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def _open(ranks: RankEnvironment, timeout_s: float) -> dist.Store:
    if ranks.store_file is not None:
        return dist.FileStore(ranks.store_file, ranks.world_size)
    kept_here = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not kept_here:
        _await_keeper(ranks, timeout_s)
    try:
        return dist.TCPStore(
            ranks.address,
            ranks.port,
            ranks.world_size,
            is_master=kept_here,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=_listen_on_loopback(ranks) if kept_here else None,
        )
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ConfigError(
            f"MASTER_ADDR={ranks.address}, MASTER_PORT={ranks.port}: rank {ranks.rank} cannot meet the others there: "
            f"{reason}; give another port, the same to all ranks"
        ) from error


def _listen_on_loopback(ranks: RankEnvironment) -> int | None:
    """A socket for a store that only this machine is to reach; None where others are to, for which torch listens on
    all addresses."""
    found = socket.getaddrinfo(ranks.address, ranks.port, type=socket.SOCK_STREAM)
    family, address = found[0][0], found[0][4]
    if not str(address[0]).startswith("127.") and address[0] != "::1":
        return None
    return socket.create_server(address[:2], family=family, backlog=2048).detach()


def _await_keeper(ranks: RankEnvironment, timeout_s: float) -> None:
    """Wait until the store can be reached. Torch would wait too, with lines of its own."""

    def is_there() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((ranks.address, ranks.port), timeout=5.0):
            return True
        return False

    keeper = f"rank 0 at {ranks.address}:{ranks.port}"
    if not _wait(is_there, lambda: keeper, ranks, timeout_s):
        raise CommError(
            f"{keeper} did not come within {timeout_s:g} s (World.from_environment(timeout_s=...)); start it, with the "
            "same MASTER_ADDR and MASTER_PORT"
        )


def _wait(is_over: Callable[[], bool], missing: Callable[[], str], ranks: RankEnvironment, limit_s: float) -> bool:
    """Wait for something; return whether it was over in time. Every ten seconds a line says who is missing, unless
    that is nothing."""
    pause_s = max(_POLL_S, ranks.world_size / _RANKS_PER_POLL_S)
    started_s, next_s = time.monotonic(), REMINDER_S
    while not is_over():
        waited_s = time.monotonic() - started_s
        if waited_s >= next_s:
            next_s += REMINDER_S
            if names := missing():
                line = f"rank {ranks.rank} waits for {names} ({waited_s:.0f} of {limit_s:g} s)"
                print(line, file=sys.stderr, flush=True)
        if waited_s >= limit_s:
            return False
        time.sleep(pause_s)
    return True
