"""N gloo processes on this machine, started in a tenth of a second each."""

import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

HANG_S = 600.0
"""Seconds after which a test counts as hung: enough for a slow, busy machine. Pytest's own limit for a test, in
pyproject.toml, is above it: the waiting rank names what hangs."""
PRELOADED = (
    "torch._dynamo",
    "zerotrain.api",
    "zerotrain.config.schema",
    "zerotrain.models",
    "zerotrain.training",
    "hydra",
    "psutil",
    "pytest",
)
"""Imported once by the fork server. Each rank would take 1.5 s for it: the first step of an optimizer imports
torch._dynamo.
"""
_PRELOADED_AS_HERE = ("peft", "torchmetrics", "transformers")
"""Likewise, where this process has imported them: each rank of a test of theirs would take 1 to 2 s."""
GRACE_S = 30.0
"""A rank that has lost another one is told of only if no cause comes from another rank within this: it may be heard
before the rank that died (seen under load)."""
_SIGNS_OF_LOST_RANKS = ("/gloo/", "Connection closed by peer", "Connection reset by peer")


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time; the message holds the rank and its traceback."""


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = HANG_S, num_threads: int = 1
) -> list[Any]:
    """Call `fn(*args)` on `size` processes with an initialised gloo group and return what each returned, by rank.

    Args:
        fn: a module-level function; it, its arguments and results must be picklable.
        timeout_s: seconds until all processes are killed and the call fails.
        num_threads: torch's CPU threads in each process.

    Raises:
        RankError: naming the first rank that failed; one that only lost others comes behind them.
    """
    # A fork of a process can hang once torch's thread pools have run in it; a fork server has run none.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(name for name in _PRELOADED_AS_HERE if name in sys.modules)])
    # With this process's path: it would import another copy of zerotrain.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with patch.dict(os.environ, PYTHONPATH=path, PYTHONSAFEPATH="1"):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, fn, args, rank, size, store, timeout_s, num_threads), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        except RankError:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                if process.is_alive():
                    process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    noticed = ""
    while waiting:
        ready = wait(list(waiting), timeout=GRACE_S if noticed else timeout_s)
        if not ready:
            silent = f"ranks {sorted(waiting.values())} gave no answer within {GRACE_S if noticed else timeout_s} s"
            raise RankError(f"{noticed}{silent}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer: _Answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without an answer") from None
            if answer.failure and not answer.lost_others:
                raise RankError(f"rank {rank} failed:\n{answer.failure}")
            if answer.failure:
                noticed = noticed or f"rank {rank} failed:\n{answer.failure}"
            results[rank] = answer.result
    if noticed:
        raise RankError(noticed)
    return results


@dataclass(frozen=True)
class _Answer:
    """How the function ended on one rank."""

    result: Any = None
    failure: str = ""
    """A traceback."""
    lost_others: bool = False
    """Whether the rank failed only because another one was gone, or did not come."""

    @classmethod
    def from_error(cls, error: BaseException) -> "_Answer":
        names = {kind.__name__ for kind in type(error).__mro__}
        from_backend = type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_LOST_RANKS)
        # By name: nothing of zerotrain is imported here, and torch.distributed by the ranks alone.
        lost_others = from_backend or (bool(names & {"CommError", "DistError"}) and "DisagreementError" not in names)
        return cls(failure="".join(traceback.format_exception(error)), lost_others=lost_others)


def _rank_main(
    pipe: Connection,
    fn: Callable[..., Any],
    args: Any,
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    num_threads: int,
) -> None:
    gc.freeze()  # what the fork server has imported: a collection would look through it in each rank
    import torch
    import torch.distributed as dist

    torch.set_num_threads(num_threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        answer = _Answer(fn(*args))
        dist.barrier()
    except BaseException as error:
        answer = _Answer.from_error(error)
    # By value: the default pickler would lend a tensor's memory, and that ends with this process.
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if not answer.failure:
        dist.destroy_process_group()
    # A gloo thread may still wait for a failed rank; nothing of this process is needed any more.
    os._exit(1 if answer.failure else 0)
