"""Being started by torchrun (or anything that sets its variables): one rank composes, the others receive."""

import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist

from zerotrain.launching import exits
from zerotrain.launching.environment import RankEnvironment
from zerotrain.launching.failures import Failure, first_failure
from zerotrain.launching.job import Job, write_ending
from zerotrain.launching.worker import exit_now, run_rank

_JOB_KEY = "job"
_NO_JOB = "none"
_PEER_HEAD_START_S = 2.0


class JobExchange:
    """Passes the job from rank 0 to the others, through the store that torchrun runs for its ranks."""

    def __init__(self) -> None:
        store, _, _ = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore("zerotrain/launch", store)

    def publish(self, job: Job) -> None:
        """Hand the job to the other ranks."""
        self._store.set(_JOB_KEY, job.to_json())

    def withdraw(self) -> None:
        """Tell the other ranks that there is no job, unless there is one."""
        if not self._store.check([_JOB_KEY]):
            self._store.set(_JOB_KEY, _NO_JOB)

    def receive(self) -> Job | None:
        """Wait for the job of rank 0; None where it has none."""
        message = self._store.get(_JOB_KEY).decode()
        return None if message == _NO_JOB else Job.from_json(message)


def run_here(job: Job, ranks: RankEnvironment) -> dict[str, Any]:
    """Run this process's rank of the job; end the process if the job does not complete."""
    if ranks.local_rank == 0:
        job.complete_folder()
    # The rank's own output goes to its log from here on.
    terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    try:
        return run_rank(job, ranks)
    except KeyboardInterrupt:
        _settle(job, ranks)
        exit_now(exits.of_signal(signal.SIGINT))
    except Exception as error:  # its traceback is in the log
        _settle(job, ranks)
        failure = Failure.of(error, ranks.rank)
        if failure.from_peers:
            # Torchrun takes the first process to end for the root cause: let the rank that is it go first.
            time.sleep(_PEER_HEAD_START_S)
        else:
            print(failure.as_error(job.ranks_dir), file=terminal, flush=True)
        exit_now(exits.FAILED)


def _settle(job: Job, ranks: RankEnvironment) -> None:
    """Say in result.json why the job ended. Every rank does, since only the last to fail has seen all causes."""
    failure = first_failure(job.ranks_dir)
    if failure is None:
        write_ending(job, ranks.world_size, status="stopped", error="stopped by a signal")
    else:
        write_ending(job, ranks.world_size, status="failed", error=str(failure.as_error(job.ranks_dir)))
