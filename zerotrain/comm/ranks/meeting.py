"""The meeting of a run's ranks: a store that all of them reach, the wait there until all have come, and the process
groups that they then make together."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from zerotrain.comm.accounts.shortage import shortage
from zerotrain.comm.accounts.whereabouts import first_line, named
from zerotrain.comm.accounts.within import within
from zerotrain.comm.ranks.environment import RankEnvironment
from zerotrain.comm.ranks.hosts import AUTO, RankHost, choose_interface, names_of_hosts
from zerotrain.comm.ranks.stores import (
    POLL_S,
    STORE_LIMIT_S,
    WHERE,
    keeper_is_gone,
    meet_at_rank_0,
    of_this_start,
    open_store,
    reach,
    wait,
)
from zerotrain.errors import CommError, ConfigError

_GRACE_S = 3.0
"""How long a rank that gives up waits for the others' words: they give up almost together."""
_worlds = itertools.count()
"""Meetings of this process. In the same store each has keys of its own: those of the last are still there."""
_makings = itertools.count()
"""Likewise, of what ranks make together."""

T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """The common things of ranks that have met."""

    store: dist.Store
    """For what they do together."""
    hosts: tuple[str, ...]
    """The name of each rank's host, by rank; none where all are on one."""


def meet(ranks: RankEnvironment, timeout_s: float, *, backend: str = "gloo", interface: str | None = AUTO) -> Met:
    """Wait until all ranks have come. Each then listens where the others reach it if they are of several hosts.

    Args:
        backend: of the collectives.
        interface: see `World.from_environment`.

    Raises:
        CommError: some have not come within the time, or who keeps the store is gone.
        ConfigError: processes were started as the same rank, or of another number of ranks; a rank cannot be reached
            from other hosts; or as of `open_store`.
    """
    place = RankHost.here(ranks.world_size, ranks.address, backend, interface)
    world = dist.PrefixStore(f"world/{next(_worlds)}", open_store(ranks, timeout_s))
    came = dist.PrefixStore("came", world)
    try:
        num_processes = came.add(f"processes/{ranks.rank}", 1)
        if num_processes == 1:
            came.set(str(ranks.rank), place.to_json())
            await_ranks(came, ranks, range(ranks.world_size), timeout_s)
            # Who was told of more ranks than rank 0 finds all there too.
            keys = [str(rank) for rank in range(ranks.world_size)]
            places = [RankHost.from_json(said) for said in came.multi_get(keys)]
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
    return Met(world, names_of_hosts(places))


def make_together(ranks: RankEnvironment, make: Callable[[], T], limit_s: float, hosts: Sequence[str] = ()) -> T:
    """Have all ranks call `make` at once, since all have come; returns its result. A rank that dies meanwhile is not
    waited for as long as a late one.

    Args:
        hosts: see `Met`.

    Raises:
        CommError: they could not; it names the ranks that were not heard of.
    """
    place, started_s = f"gave_up/{next(_makings)}", time.monotonic()
    try:
        return within(limit_s, make)
    except (RuntimeError, TimeoutError) as error:
        lacking = shortage(error)
        reason = f"{first_line(error)}; {lacking}" if lacking else first_line(error)
        said = _exchange_reasons(ranks, place, reason, started_s + limit_s + _GRACE_S)
        if lacking:
            message = f"rank {ranks.rank} failed in {WHERE}: {reason}"
            raise CommError(message, where=WHERE, waited_s=time.monotonic() - started_s, is_own=True) from error
        if said is None:
            raise keeper_is_gone(ranks) from error
        silent = [rank for rank in range(ranks.world_size) if rank not in said]
        who = f"{named(silent, hosts)} came to {WHERE}, and did not join the others: killed, or stopped"
        reasons = (f"rank {rank}: {words}" for rank, words in sorted(said.items()))
        raise CommError(
            "; ".join([who if silent else f"{WHERE} failed", *reasons]),
            unheard=tuple(silent),
            where=WHERE,
            waited_s=time.monotonic() - started_s,
        ) from error


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
    in_time = wait(lambda: came.check(keys), lambda: named(missing()) if is_first() else "", ranks, timeout_s)
    if not in_time and (absent := missing()):
        raise CommError(
            f"{named(absent)} did not come within {timeout_s:g} s (World.from_environment(start_timeout_s=...)); start "
            "all ranks, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            unheard=tuple(absent),
            where=WHERE,
            waited_s=timeout_s,
        )


def _exchange_reasons(ranks: RankEnvironment, place: str, reason: str, deadline_s: float) -> dict[int, str] | None:
    """Why each rank gave up that says so in time; None where the store is gone.

    Raises:
        CommError: this rank cannot reach the store for want of something.
    """
    said = {ranks.rank: reason}
    try:
        # A connection of its own: that of the process answers nobody while something is waited for in it.
        store = dist.PrefixStore(place, of_this_start(reach(ranks, STORE_LIMIT_S)))
        store.set(str(ranks.rank), reason)
    except (CommError, ConfigError, RuntimeError) as unreached:
        if isinstance(unreached, CommError) and unreached.is_own:
            raise
        return None
    with contextlib.suppress(dist.DistError):  # who keeps the store has heard all, and ended
        while len(said) < ranks.world_size and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            for rank in set(range(ranks.world_size)) - set(said):
                if store.check([str(rank)]):
                    said[rank] = store.get(str(rank)).decode(errors="replace")
    if ranks.rank == 0 and meet_at_rank_0(ranks):
        time.sleep(_GRACE_S / 2)  # for those who read a moment later
    return said
