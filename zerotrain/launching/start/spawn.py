"""Starting the ranks of a job on this machine, and waiting for them."""

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from zerotrain.comm.environment import STORE_VARIABLE
from zerotrain.launching.end import exits
from zerotrain.launching.end.failures import RunError, first_failure, lost_folder
from zerotrain.launching.end.signals import Ended, raised
from zerotrain.launching.end.stopping import pass_on
from zerotrain.launching.job.job import Job, num_threads_per_rank
from zerotrain.launching.job.restarts import Attempts
from zerotrain.launching.start.fork_server import RankProcess, fork_server
from zerotrain.training.callbacks.stop import StopRequest, stop_requests

RANK_MODULE = "zerotrain.launching.start.rank_process"
_LOOK_EVERY_S = 0.05
_GRACE_S = 30.0
"""Time for a rank that was told to end, until it is killed."""
_REMOVE_BEHIND_US = 'read _; for second in 1 2 3 4 5; do rm -rf "$0" && exit; sleep 1; done'
"""Shell command that removes a folder once this process has ended: ranks that are ending may still write there."""


def run_ranks(attempts: Attempts, num_ranks: int) -> int:
    """Start the ranks and wait until all have ended; after a failure start them again, as often as the config allows.
    Whatever happens, none is left.

    The first signal to stop goes to the ranks, which end together and have all the time they need. They are ended at
    once where not all of them are at work yet or they evaluate, and by a second signal.

    Returns:
        The signal to stop that has come and let them end, or not kept them from completing; 0 for none.

    Raises:
        RunError, ConfigError: the first cause of the failure of a rank.
        KeyboardInterrupt: Ctrl-C; SystemExit: another signal to stop; the ranks were ended at once.
    """
    job = attempts.job

    def tell(signum: int) -> bool:
        return job.evaluates is None and pass_on(job.ranks_dir, num_ranks, signum)

    with stop_requests(tell) as stop:
        while True:
            try:
                _run_once(attempts.job, num_ranks, stop)
                return stop.signum
            except RunError as error:
                if stop.signum:
                    raise
                print(attempts.begin_next(error), file=sys.stderr, flush=True)
            except KeyboardInterrupt as error:
                raise _ended_at_once(stop.signum or signal.SIGINT) from error


def _run_once(job: Job, num_ranks: int, stop: StopRequest) -> None:
    """One attempt, with the errors of `run_ranks`; KeyboardInterrupt where `stop` has heard of a signal and the ranks
    were ended at once."""
    with ranks_folder() as folder:
        # A file of their own: two runs in one folder once trained the config.yaml of the later one (2026-11-21).
        job_path = Path(folder) / "job.json"
        job_path.write_text(job.to_json())
        try:
            with raised(signal.SIGHUP, signal.SIGQUIT):
                codes = _codes_of_first_to_fail(job, job_path, num_ranks)
        except Ended as error:
            # SystemExit, as Hydra would take an Exception for a failed job, after which a sweep goes on with the next.
            raise _ended_at_once(error.signum) from error
        finally:
            Console().show_cursor(True)  # which the progress bar of a killed rank 0 leaves hidden
        failure = _failure(job, codes, stop)
        if failure is not None:
            raise failure
        if codes:
            raise KeyboardInterrupt  # told to stop when not all were in their training


def _codes_of_first_to_fail(job: Job, job_path: Path, num_ranks: int) -> dict[int, int]:
    """Start the ranks and wait until all have ended, or one has failed; end those that are left. Return the exit codes,
    by rank, of those that had failed before, or were killed meanwhile by others; none where all have completed."""
    ranks: list[RankProcess] = []
    signum: int = signal.SIGTERM
    try:
        for rank in range(num_ranks):
            ranks.append(_start(job, job_path, rank, num_ranks))
        while True:
            codes = _codes_of(ranks)
            failed = {rank: code for rank, code in codes.items() if code != 0}
            if failed or len(codes) == num_ranks:
                break
            time.sleep(_LOOK_EVERY_S)
    except Ended as error:
        signum = error.signum
        raise
    finally:
        sent = _end(ranks, signum)
    # Where memory runs out, ranks are killed one after the other.
    killed = {rank: code for rank, code in _codes_of(ranks).items() if code < 0 and -code not in sent}
    return failed and killed | failed


def _codes_of(ranks: list[RankProcess]) -> dict[int, int]:
    """The exit codes of those that have ended, by rank."""
    return {rank: code for rank, process in enumerate(ranks) if (code := process.poll()) is not None}


def _start(job: Job, job_path: Path, rank: int, num_ranks: int) -> RankProcess:
    """Start a rank: forked from the server where there is one, else as a new Python, as GPUs need it."""
    environment = _environment(job, rank, num_ranks, job_path.parent)
    server = None if job.config.launch.device == "cuda" else fork_server()
    forked = server.start(str(job_path), environment) if server else None
    return forked or _SpawnedRank(job_path, environment)


class _SpawnedRank(subprocess.Popen[bytes]):
    """A `RankProcess` that is a new Python."""

    def __init__(self, job_path: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", RANK_MODULE, str(job_path)]
        super().__init__(command, env=environment, start_new_session=True)

    def send_signal(self, signum: int) -> None:
        """Signal its process group."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)


def _end(ranks: list[RankProcess], signum: int) -> set[int]:
    """End the ranks that are left: by this signal, and by SIGKILL `_GRACE_S` later or when another signal comes.

    Returns:
        The signals that were sent.
    """
    kill_s = time.monotonic() + _GRACE_S
    came: BaseException | None = None
    sent = {signum}
    left = [process for process in ranks if process.poll() is None]
    for process in left:
        process.send_signal(signum)
    while left := [process for process in left if process.poll() is None]:
        try:
            if time.monotonic() > kill_s:
                kill_s = math.inf
                sent.add(signal.SIGKILL)
                for process in left:
                    process.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)
        except (KeyboardInterrupt, Ended) as error:
            came, kill_s = error, 0.0
    if came is not None:
        raise came
    return sent


@contextmanager
def ranks_folder() -> Iterator[str]:
    """A folder in TMPDIR that only its owner may read, in which this process and its ranks meet. It goes with this
    process, however that ends: `kill -9` left it, with the job in it (2026-11-23)."""
    with tempfile.TemporaryDirectory(prefix="zerotrain_") as folder:
        remover = None
        with suppress(OSError):  # no process to be had: it is removed but for kill -9
            # In a session of its own, which no Ctrl-C reaches.
            remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE_BEHIND_US, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        try:
            yield folder
        finally:
            if remover is not None:
                remover.communicate()


def _ended_at_once(signum: int) -> BaseException:
    """The exception to raise after this signal has ended the ranks at once."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt()
    print(f"stopped by {signal.Signals(signum).name}", file=sys.stderr)
    return SystemExit(exits.of_signal(signum))


def _failure(job: Job, codes: dict[int, int], stop: StopRequest) -> BaseException | None:
    """The first cause of the run's end; None where it has completed, or was stopped. A rank that has ended before its
    work was done is found though its exit code was 0, as by os._exit(0). A signal that told one rank to stop, before
    all could end in order, has told the run."""
    if not job.ranks_dir.is_dir():
        return lost_folder(job.run_dir)
    failure = first_failure(job.ranks_dir, codes, by_user=stop.signum != 0)
    if failure is not None and failure.stopped_by is not None:
        return _ended_at_once(signal.Signals[failure.stopped_by])
    return None if failure is None else failure.as_error(job.ranks_dir)


def _environment(job: Job, rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    """The environment of a rank: torchrun's variables, and where the ranks meet, which nobody else can."""
    changes = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",  # nobody listens there: the ranks meet in a file
        STORE_VARIABLE: str(folder / "store"),
        "OMP_NUM_THREADS": str(num_threads_per_rank(job.config, num_ranks)),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",  # and from nowhere else: `python -m` would put the folder where the user is before all
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        changes["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return {**os.environ, **changes}
