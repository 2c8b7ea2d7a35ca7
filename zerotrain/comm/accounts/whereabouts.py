"""A rank's message when a collective fails: which one, how long it waited, and where the other ranks failed.

A step that succeeds pays nothing for this. A rank whose collective fails writes where it is into the store that all
ranks have met in, and reads there for a short while what the others write.
"""

import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm.accounts.shortage import shortage
from zerotrain.comm.accounts.within import within
from zerotrain.errors import CommError

GRACE_S = 2.0
"""How long a rank whose collective has failed waits for the other ranks' words. Ranks that wait for each other in
different places time out almost together."""
_STORE_S = 1.0
"""How much longer a store may take to answer."""
_POLL_S = 0.05
_TIME_IS_UP = re.compile(r"time[d -]*out", re.IGNORECASE)
"""In what backends raise when they have waited, and not lost a connection."""
_WHERE_IN_GLOO = re.compile(r"^\[[^\]]*\] ?")


def by_rank(values: Sequence[object]) -> str:
    """Each value and the ranks that have it, such as "2 on ranks 0, 2, 1 on rank 1"."""
    ranks: dict[object, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{_short(value)} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for value, on in ranks.items())


def named(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks as a person calls them, such as "ranks 0, 2", or "n1 (ranks 2, 3), rank 5 on n2"; nothing for none.

    Args:
        hosts: the name of each rank's host, by rank; none where there is one host.
    """
    if not hosts:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    said = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        of_host = [rank for rank in ranks if hosts[rank] == host]
        is_whole = len(of_host) == hosts.count(host)
        said.append(f"{host} ({named(of_host)})" if is_whole else f"{named(of_host)} on {host}")
    return ", ".join(said)


def _short(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


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

    def lost_others(self, error: RuntimeError, collective: str, waited_s: float) -> CommError:
        """The error to raise if the backend has timed out or lost its connection.

        A group that has failed once fails again at each call, such as those of a clean-up: the first error is raised
        again. `collective` is such as "gather of blocks.0".
        """
        if self._lost is not None:
            return self._lost
        here = f"{collective} ({self.describe()})"
        if lacking := shortage(error):
            said = f"rank {self.rank} failed in {here}: {first_line(error)}; {lacking}"
            self._lost = CommError(said, where=here, waited_s=waited_s, is_own=True)
            return self._lost
        reason = first_line(error)
        in_time, failed_s = not _TIME_IS_UP.search(reason), time.monotonic()
        heard = self._exchange_words("failed", here, GRACE_S)
        if not self._store_answers and not in_time:  # who is cut off from it lets those who are not tell it first
            time.sleep(max(0.0, failed_s + GRACE_S + _STORE_S - time.monotonic()))
        said = f"rank {self.rank} failed in {here} after {waited_s:.1f} s: {reason}"
        self._lost = self._missing(said, here, waited_s, heard, in_time=in_time)
        return self._lost

    def overdue(self, here: str, waited_s: float, grace_s: float) -> CommError:
        """The error to tell of a collective that does not end. `here` is such as "gather of blocks.0 (step 3,
        forward)"; so long, `grace_s`, others may take to come to the same."""
        heard = self._exchange_words("overdue", here, grace_s)
        said = f"rank {self.rank} has waited {waited_s:.1f} s in {here}"
        return self._missing(said, here, waited_s, heard, in_time=False)

    def take_back(self) -> None:
        """The collective that was overdue has ended: leave the other ranks no word of it."""
        with suppress(RuntimeError, ValueError):
            self._words("overdue").delete_key(str(self.rank))

    def _missing(self, said: str, here: str, waited_s: float, heard: dict[int, str], *, in_time: bool) -> CommError:
        """An error that says of each other rank what is known of it."""
        lines = [f"rank {rank} failed in {where}" for rank, where in sorted(heard.items())]
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in heard]
        if silent:
            lines.append(f"no answer from {named(silent, self.hosts)}, which may compute, sleep or be gone")
        if not self._store_answers:
            lines.append("no answer from the store in which the ranks have met")
            # Those of this host could say no more than this one.
            silent = [rank for rank in silent if not self.hosts or self.hosts[rank] != self.hosts[self.rank]]
        return CommError(
            f"{said}; {'; '.join(lines)}. All ranks must make the same calls in the same order",
            unheard=() if in_time else tuple(silent),
            where=here,
            waited_s=waited_s,
        )

    def _words(self, subject: str) -> dist.Store:
        return dist.PrefixStore(f"zerotrain/{subject}/{self.group_name}", _get_default_store())

    def _exchange_words(self, subject: str, here: str, grace_s: float) -> dict[int, str]:
        """Leave `here` for the other ranks; return what they have left, or leave within the grace."""
        heard: dict[int, str] = {}

        def exchange() -> None:
            store = self._words(subject)
            store.set(str(self.rank), here)
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
