"""Every machine of a run has its data before the ranks meet: who prepares text may take hours, a collective may not."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from zerotrain.comm.environment import RankEnvironment
from zerotrain.errors import CommError, ConfigError

REMINDER_S = 10.0
_BEAT_S = 1.0
_POLL_S = 0.1
_RANKS_PER_POLL_S = 2000
_FAILED = "failed"


def prepare_everywhere(
    store: dist.Store, ranks: RankEnvironment, prepare: Callable[[], object], timeout_s: float
) -> None:
    """Prepare the data where rank 0 has not, once on each machine, and wait until all have it, as long as it takes.

    Args:
        store: that all ranks reach, and nobody else writes to.
        prepare: makes the data of a machine, and raises ConfigError where that cannot be done.
        timeout_s: after which a rank of which nothing is heard is taken for gone.

    Raises:
        ConfigError: the data of a machine cannot be made; on all ranks.
        CommError: nothing was heard of a rank that prepares.
        Exception: what `prepare` raises.
    """
    if ranks.local_world_size == ranks.world_size:  # rank 0 has tried it out
        return
    if ranks.local_rank == 0 and ranks.rank > 0:
        try:
            with _heard(store, ranks.rank):
                prepare()
        except BaseException as error:
            cause = str(error) or type(error).__name__
            store.set(_FAILED, "\n".join(f"rank {ranks.rank}: {line}" for line in cause.splitlines()))
            raise
    store.set(f"done/{ranks.rank}", "")
    _wait(store, ranks, timeout_s)


@contextmanager
def _heard(store: dist.Store, rank: int) -> Iterator[None]:
    """Inside, the others hear that this rank is at work."""
    is_over = threading.Event()

    def beat() -> None:
        count = 0
        while not is_over.wait(_BEAT_S if count else 0.0):
            count += 1
            store.set(f"beat/{rank}", str(count))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _wait(store: dist.Store, ranks: RankEnvironment, timeout_s: float) -> None:
    keys = [f"done/{rank}" for rank in range(ranks.world_size)]
    started_s, next_s = time.monotonic(), REMINDER_S
    heard: dict[int, tuple[bytes, float]] = {}
    while not store.check(keys):
        if store.check([_FAILED]):
            raise ConfigError(*store.get(_FAILED).decode().splitlines())
        waited_s = time.monotonic() - started_s
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        for rank in missing:
            beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = (beat, waited_s)
            elif waited_s > heard[rank][1] + timeout_s:
                raise CommError(
                    f"rank {rank} prepares the data of its machine, and did not answer for {timeout_s:g} s",
                    unheard=(rank,),
                    where="the preparing of the data",
                    waited_s=waited_s,
                )
        if waited_s >= next_s and missing and ranks.rank == 0:
            next_s += REMINDER_S
            named = ", ".join(map(str, missing))
            line = f"rank 0 waits for the machine of rank {named} to prepare its data ({waited_s:.0f} s)"
            print(line, file=sys.stderr, flush=True)
        time.sleep(max(_POLL_S, ranks.world_size / _RANKS_PER_POLL_S))
