"""The meeting place of a run's ranks is a store: a file, the store of torchrun's agent, or one kept by rank 0."""

import contextlib
import itertools
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.comm.hosts import AUTO, RankHost, choose_interface, is_loopback, names_of_hosts
from zerotrain.comm.whereabouts import first_line, name_ranks, shortage, within
from zerotrain.errors import CommError, ConfigError, argument

_REMINDER_S = 10.0
"""A line names the missing ranks each time so much has passed."""
POLL_S = 0.05
"""Torch's own waits say something of their own on stderr when their time is up."""
_RANKS_PER_POLL_S = 2000
"""Many ranks ask less often: all ask one store for all."""
STORE_LIMIT_S = 10.0
"""A store reached a moment ago answers within this, or is gone."""
_MAX_ANSWER_S = 1e6
WHERE = "the meeting of the ranks"
_opened: dict[RankEnvironment, dist.Store] = {}
"""The stores of this process. A port can be listened to once."""
_kept_here: list[dist.Store] = []
"""Kept by this process for the others, to its end."""


def open_store(ranks: RankEnvironment, timeout_s: float, *, across_restarts: bool = False) -> dist.Store:
    """The store of this process's ranks: a file, torchrun's, or one kept by rank 0.

    Does not wait for the other ranks, but for the keeper of the store. Nothing read from it is ever unpickled: whoever
    reaches the port of torchrun's store may write to it.

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
    limit_answers(ranks, opened, timeout_s)
    return dist.PrefixStore("zerotrain/kept", opened) if across_restarts else of_this_start(opened)


def limit_answers(ranks: RankEnvironment, store: dist.Store, timeout_s: float) -> None:
    """From here on no call to the store waits longer for who keeps it. Torch's own limit holds for a missing key;
    where a cable is pulled, TCP gives up after a quarter of an hour (2026-11-24)."""
    store.set_timeout(timedelta(seconds=timeout_s))
    options = {"TCP_USER_TIMEOUT": int(1000 * min(timeout_s, _MAX_ANSWER_S)), "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5}
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with contextlib.suppress(OSError):  # one that was closed meanwhile, or a socket without a peer
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.getpeername()[1:2] == (ranks.port,):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for name, value in options.items():
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def of_this_start(store: dist.Store) -> dist.Store:
    """The place of one start of the ranks in a store: torchrun may start them again in the same one. Rank 0's own store
    is new each time; there a host just joined counts from 0, and meets others that count more (2026-11-24)."""
    return dist.PrefixStore(f"zerotrain/{num_restarts() if _has_agent_store() else 0}", store)


def meet_at_rank_0(ranks: RankEnvironment) -> bool:
    """Whether rank 0 keeps the store in which the ranks meet."""
    return ranks.store_file is None and not _has_agent_store()


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def keep_at_rank_0(store: dist.Store, ranks: RankEnvironment, timeout_s: float) -> dist.Store:
    """The store for what ranks do together that have met in `store`: where torchrun's agent keeps that, one that rank 0
    keeps. An agent that a signal had ended before its ranks took their last save with it (2026-11-24).

    Raises:
        CommError, ConfigError: rank 0 cannot be reached.
    """
    if ranks.world_size == 1 or ranks.store_file is not None or meet_at_rank_0(ranks):
        limit_answers(ranks, store, timeout_s)
        return store
    try:
        if ranks.rank == 0:
            world_store, place = _listen_beside(ranks, timeout_s)
            store.set("rank 0 keeps", json.dumps(place))
        else:
            place = json.loads(store.get("rank 0 keeps"))
            world_store = reach(_with_store_at(ranks, *place), timeout_s)
        limit_answers(_with_store_at(ranks, *place), world_store, timeout_s)
    except dist.DistError as error:
        raise keeper_is_gone(ranks) from error
    except OSError as error:
        raise _cannot_meet(ranks, error) from error
    return dist.PrefixStore("zerotrain/world", world_store)


def leave(store: dist.Store, size: int) -> None:
    """Say good-bye to the store. Its keeper waits for the others, though not for long: a rank still reading how a save
    had ended took it for failed (2026-11-24)."""
    deadline_s = time.monotonic() + STORE_LIMIT_S
    with contextlib.suppress(dist.DistError):  # it is gone
        num_left = store.add("left", 1)
        while _kept_here and num_left < size and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            num_left = store.add("left", 0)


def _with_store_at(ranks: RankEnvironment, address: object, port: object) -> RankEnvironment:
    return replace(ranks, address=str(address), port=int(str(port)))


def _listen_beside(ranks: RankEnvironment, timeout_s: float) -> tuple[dist.Store, tuple[str, int]]:
    """A store of this process, and where the others reach it: at this one's own address on its way to torchrun."""
    with socket.create_connection((ranks.address, ranks.port), timeout=timeout_s) as reached:
        family, own_address = reached.family, str(reached.getsockname()[0])
    others_reach = own_address
    if is_loopback(own_address) and ranks.local_world_size < ranks.world_size:
        own_address, others_reach = "", ranks.address  # this is the machine that MASTER_ADDR names
    listener = socket.create_server((own_address, 0), family=family, backlog=2048)
    ranks = _with_store_at(ranks, others_reach, listener.getsockname()[1])
    return _keep_store(ranks, timeout_s, listener.detach()), (ranks.address, ranks.port)


def _keep_store(ranks: RankEnvironment, timeout_s: float, listener: int | None) -> dist.Store:
    """Keep a store for all ranks.

    Args:
        listener: the descriptor of its socket; None: torch listens on all addresses.
    """
    store = dist.TCPStore(
        ranks.address,
        ranks.port,
        ranks.world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    _kept_here.append(store)
    return store


def _keeper(ranks: RankEnvironment) -> str:
    return f"{'torchrun' if _has_agent_store() else 'rank 0'} at {ranks.address}:{ranks.port}"


def keeper_is_gone(ranks: RankEnvironment) -> CommError:
    return CommError(
        f"{_keeper(ranks)}, which keeps the store of the ranks, was there and is gone; start all ranks again",
        unheard=() if _has_agent_store() else (0,),
        where=WHERE,
    )


def _open(ranks: RankEnvironment, timeout_s: float) -> dist.Store:
    if ranks.rank > 0 or not meet_at_rank_0(ranks):
        return reach(ranks, timeout_s)
    try:
        family, _, _, _, address = socket.getaddrinfo(ranks.address, ranks.port, type=socket.SOCK_STREAM)[0]
        listener = None
        if is_loopback(str(address[0])):  # otherwise others are to reach it, and torch listens on all addresses
            listener = socket.create_server(address[:2], family=family, backlog=2048).detach()
        return _keep_store(ranks, timeout_s, listener)
    except (OSError, RuntimeError) as error:
        raise _cannot_meet(ranks, error) from error


def reach(ranks: RankEnvironment, timeout_s: float) -> dist.Store:
    """A connection to the store of another process, or to the file."""
    if ranks.store_file is not None:
        return dist.FileStore(ranks.store_file, ranks.world_size)
    keeper = _keeper(ranks)
    # Torch would wait too, with lines of its own.
    if not wait(lambda: _is_reachable(ranks), lambda: keeper, ranks, timeout_s):
        raise CommError(
            f"{keeper} did not come within {timeout_s:g} s ({argument('World.from_environment(start_timeout_s)')}); "
            "start it, with the same MASTER_ADDR and MASTER_PORT"
        )
    limit_s = min(timeout_s, STORE_LIMIT_S)

    def connect() -> dist.Store:
        # Longer than is waited for: a thread that came back while the interpreter ends would abort the process.
        timeout = timedelta(seconds=10 * limit_s)
        return dist.TCPStore(
            ranks.address, ranks.port, ranks.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )

    try:
        return within(limit_s, connect)
    except (OSError, RuntimeError) as error:
        if lacking := shortage(error):
            raise CommError(f"rank {ranks.rank} cannot meet the others: {lacking}", is_own=True) from error
        if not _is_reachable(ranks):
            raise keeper_is_gone(ranks) from error
        raise _cannot_meet(ranks, error) from error


def _cannot_meet(ranks: RankEnvironment, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
    return ConfigError(
        f"MASTER_ADDR={ranks.address}, MASTER_PORT={ranks.port}: rank {ranks.rank} cannot meet the others there: "
        f"{reason}; give another port, the same to all ranks"
    )


def _is_reachable(ranks: RankEnvironment) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((ranks.address, ranks.port), timeout=5.0):
        return True
    return False


def wait(is_over: Callable[[], bool], missing: Callable[[], str], ranks: RankEnvironment, limit_s: float) -> bool:
    """Wait for something; return whether it was over in time. Every ten seconds a line says who is missing, if
    anybody is."""
    pause_s = max(POLL_S, ranks.world_size / _RANKS_PER_POLL_S)
    started_s, next_s = time.monotonic(), _REMINDER_S
    while not is_over():
        waited_s = time.monotonic() - started_s
        if waited_s >= next_s:
            next_s += _REMINDER_S
            if names := missing():
                line = f"rank {ranks.rank} waits for {names} ({waited_s:.0f} of {limit_s:g} s)"
                print(line, file=sys.stderr, flush=True)
        if waited_s >= limit_s:
            return False
        time.sleep(pause_s)
    return True


# The meeting of a run's ranks: they reach a store, wait there until all have come, and make the process groups
# together.


_GRACE_S = 3.0
"""How long a rank waits for the others' words when it gives up: they give up almost together."""
_worlds = itertools.count()
"""Meetings of this process. In the same store each has keys of its own: those of the last are still there."""
_makings = itertools.count()
"""Likewise, of what ranks make together."""

T = TypeVar("T")


@dataclass(frozen=True)
class Meeting:
    """The common things of the ranks after their meeting."""

    store: dist.Store
    """For what they do together."""
    hosts: tuple[str, ...]
    """The name of each rank's host, by rank; none where all are on one."""


def meet(ranks: RankEnvironment, timeout_s: float, *, backend: str = "gloo", interface: str | None = AUTO) -> Meeting:
    """Wait until all ranks have come. Each then listens where the others reach it if they are of several hosts.

    Args:
        backend: of the collectives.
        interface: see `World.from_environment`.

    Raises:
        CommError: some have not come within the time, or who keeps the store is gone.
        ConfigError: processes were started as the same rank, or of another number of ranks; a rank cannot be reached
            from other hosts; or as of `open_store`.
    """
    place = RankHost.of_this_process(ranks.world_size, ranks.address, backend, interface)
    world = dist.PrefixStore(f"world/{next(_worlds)}", open_store(ranks, timeout_s))
    arrivals = dist.PrefixStore("came", world)
    try:
        num_processes = arrivals.add(f"processes/{ranks.rank}", 1)
        if num_processes == 1:
            arrivals.set(str(ranks.rank), place.to_json())
            await_ranks(arrivals, ranks, range(ranks.world_size), timeout_s)
            # A rank with a larger WORLD_SIZE than rank 0's finds all there too.
            keys = [str(rank) for rank in range(ranks.world_size)]
            places = [RankHost.from_json(text) for text in arrivals.multi_get(keys)]
    except dist.DistError as error:
        raise keeper_is_gone(ranks) from error
    if num_processes > 1:
        raise ConfigError(f"RANK: got {ranks.rank}, which another process has too; give each process its own")
    if (size := places[0].size) != ranks.world_size:
        raise ConfigError(f"WORLD_SIZE: got {ranks.world_size}, and rank 0 got {size}; give all ranks the same")
    try:
        choose_interface(places, ranks.rank, interface)
    except ConfigError:  # all raise it, and who keeps the store is the last to end
        read = dist.PrefixStore("read", world)
        with contextlib.suppress(CommError, dist.DistError):
            read.set(str(ranks.rank), "")
            if ranks.rank == 0 and meet_at_rank_0(ranks):
                await_ranks(read, ranks, range(ranks.world_size), STORE_LIMIT_S)
        raise
    return Meeting(world, names_of_hosts(places))


def make_together(ranks: RankEnvironment, make: Callable[[], T], limit_s: float, hosts: Sequence[str] = ()) -> T:
    """Have all ranks call `make` at once, since all have come; returns its result. A dead rank is not
    waited for as long as a late one.

    Args:
        hosts: see `Meeting`.

    Raises:
        CommError: they could not; it names the ranks that were not heard of.
    """
    place, started_s = f"gave_up/{next(_makings)}", time.monotonic()
    try:
        return within(limit_s, make)
    except (RuntimeError, TimeoutError) as error:
        lacking = shortage(error)
        reason = f"{first_line(error)}; {lacking}" if lacking else first_line(error)
        reason_of = _exchange_reasons(ranks, place, reason, started_s + limit_s + _GRACE_S)
        if lacking:
            message = f"rank {ranks.rank} failed in {WHERE}: {reason}"
            raise CommError(message, where=WHERE, waited_s=time.monotonic() - started_s, is_own=True) from error
        if reason_of is None:
            raise keeper_is_gone(ranks) from error
        silent = [rank for rank in range(ranks.world_size) if rank not in reason_of]
        who = f"{name_ranks(silent, hosts)} came to {WHERE}, and did not join the others: killed, or stopped"
        reasons = (f"rank {rank}: {words}" for rank, words in sorted(reason_of.items()))
        raise CommError(
            "; ".join([who if silent else f"{WHERE} failed", *reasons]),
            unheard=tuple(silent),
            where=WHERE,
            waited_s=time.monotonic() - started_s,
        ) from error


def await_ranks(store: dist.Store, ranks: RankEnvironment, awaited: Sequence[int], timeout_s: float) -> None:
    """Wait until the keys of these ranks, their numbers, are in a store. The first of the ranks there names the missing
    ones every ten seconds.

    Raises:
        CommError: some have not come within the time.
    """

    def missing() -> list[int]:
        return [rank for rank in awaited if not store.check([str(rank)])]

    def is_first() -> bool:
        return not any(store.check([str(rank)]) for rank in range(ranks.rank))

    keys = [str(rank) for rank in awaited]
    in_time = wait(lambda: store.check(keys), lambda: name_ranks(missing()) if is_first() else "", ranks, timeout_s)
    if not in_time and (absent := missing()):
        raise CommError(
            f"{name_ranks(absent)} did not come within {timeout_s:g} s "
            f"({argument('World.from_environment(start_timeout_s)')}); start all ranks, with the same WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT",
            unheard=tuple(absent),
            where=WHERE,
            waited_s=timeout_s,
        )


def _exchange_reasons(ranks: RankEnvironment, place: str, reason: str, deadline_s: float) -> dict[int, str] | None:
    """The reasons of the ranks for giving up, as far as they come in time; None where the store is gone.

    Raises:
        CommError: this rank cannot reach the store for want of something.
    """
    reason_of = {ranks.rank: reason}
    try:
        # A connection of its own: that of the process answers nobody while something is waited for in it.
        store = dist.PrefixStore(place, of_this_start(reach(ranks, STORE_LIMIT_S)))
        store.set(str(ranks.rank), reason)
    except (CommError, ConfigError, RuntimeError) as unreached:
        if isinstance(unreached, CommError) and unreached.is_own:
            raise
        return None
    with contextlib.suppress(dist.DistError):  # who keeps the store has heard all, and ended
        while len(reason_of) < ranks.world_size and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            for rank in set(range(ranks.world_size)) - set(reason_of):
                if store.check([str(rank)]):
                    reason_of[rank] = store.get(str(rank)).decode(errors="replace")
    if ranks.rank == 0 and meet_at_rank_0(ranks):
        time.sleep(_GRACE_S / 2)  # for those who read a moment later
    return reason_of
