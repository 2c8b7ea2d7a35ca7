"""Being started by torchrun (or anything that sets its variables): one rank composes, the others receive."""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.comm.meeting import await_ranks, open_store
from zerotrain.config.schema import LaunchConfig
from zerotrain.config.words import words_of_config
from zerotrain.errors import CommError, ConfigError, CorruptionError
from zerotrain.files.lock import lock, open_lock
from zerotrain.files.terminal import LastingStream
from zerotrain.files.untrusted import only_regular
from zerotrain.launching import exits
from zerotrain.launching.failures import Failure, first_failure, lost_folder
from zerotrain.launching.job import Job, write_ending
from zerotrain.launching.presence import read_states
from zerotrain.launching.worker import exit_now, run_rank
from zerotrain.preflight.check import prepare_data

# Every machine of a run has its data before the ranks meet: the preparing of text may take hours, a collective may not.


REMINDER_S = 10.0
_BEAT_S = 1.0
_POLL_S = 0.1
_RANKS_PER_POLL_S = 2000
_PREPARING_FAILED = "failed"


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
            with _heartbeat(store, ranks.rank):
                prepare()
        except BaseException as error:
            cause = str(error) or type(error).__name__
            store.set(_PREPARING_FAILED, "\n".join(f"rank {ranks.rank}: {line}" for line in cause.splitlines()))
            raise
    store.set(f"done/{ranks.rank}", "")
    _wait(store, ranks, timeout_s)


@contextmanager
def _heartbeat(store: dist.Store, rank: int) -> Iterator[None]:
    """Inside, the other ranks hear that this one is at work."""
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
        if store.check([_PREPARING_FAILED]):
            raise ConfigError(*store.get(_PREPARING_FAILED).decode().splitlines())
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
            numbers = ", ".join(map(str, missing))
            line = f"rank 0 waits for the machine of rank {numbers} to prepare its data ({waited_s:.0f} s)"
            print(line, file=sys.stderr, flush=True)
        time.sleep(max(_POLL_S, ranks.world_size / _RANKS_PER_POLL_S))


_JOB_KEY = "job"
_RUN_DIR_KEY = "run_dir"
_NO_JOB = "none"
_REFUSED = "refused "
_FAILED = "failed "
_HEARING_S = 9.0
"""Less than the time before the line about missing ranks."""
_MAX_TIMEOUT_S = 1e6
_PEER_HEAD_START_S = 2.0
_STOP_HEAD_START_S = 1.0
_STORE_LASTS_S = 1.0
_TORCHRUN_LIMIT_S = 5
"""Torchrun notes the end of a rank within this time: it looks every tenth of a second."""
_END_TORCHRUN = """
for _ in $(seq ${2}0); do
  [ -d /proc/$0 ] || exit
  sleep 0.1
done
grep -q '^State:.Z' /proc/$0/status || exit
echo "$3" >&2
kill -KILL $1
"""
"""Its arguments: the processes of the rank and of torchrun, the limit, the line to say. An ended rank stays in /proc
until its parent takes note."""
_KILLED = "torchrun waits for a store that does not answer, as its ranks have ended: it is killed"


class JobExchange:
    """Passes the job from rank 0 to the others, through torchrun's store for its ranks.

    Its entries are read as JSON, and never unpickled.
    """

    def __init__(self, ranks: RankEnvironment) -> None:
        """Come, with the command line of this process.

        Raises:
            ConfigError, CommError: the store cannot be used, or nobody keeps it.
        """
        with words_of_config():
            self._store = dist.PrefixStore("launch", open_store(ranks, _own_timeout_s()))
            self._lasting = open_store(ranks, _own_timeout_s(), across_restarts=True)
        self._ranks, self._arguments, self._is_published = ranks, sys.argv[1:], False
        self._arrivals = dist.PrefixStore("came", self._store)
        self._arrivals.set(str(ranks.rank), json.dumps(self._arguments))
        self._receipts = dist.PrefixStore("heard", self._store)

    def require_same_commands(self, timeout_s: float) -> None:
        """Wait for all ranks, and refuse the job on all of them where one was started with another command line: it
        would have been ignored.

        Raises:
            ConfigError: it was.
            CommError: some ranks have not come.
        """
        with words_of_config():
            await_ranks(self._arrivals, self._ranks, range(self._ranks.world_size), timeout_s)
        own = Counter(self._arguments)
        for rank in range(1, self._ranks.world_size):
            theirs = Counter(json.loads(self._arrivals.get(str(rank))))
            if theirs != own:
                differences = {"has": theirs - own, "lacks": own - theirs}
                findings = (f"{verb} {shlex.join(words.elements())}" for verb, words in differences.items() if words)
                problem = (
                    f"rank {rank}: its command line differs from that of rank 0: it {' and '.join(findings)}; start "
                    "every machine with the same command line"
                )
                self._store.set(_JOB_KEY, _REFUSED + problem)
                raise ConfigError(problem)

    def publish(self, job: Job) -> None:
        """Hand the job to the other ranks, and its folder to those that torchrun may start after them."""
        self._lasting.set(_RUN_DIR_KEY, str(job.run_dir))
        self._store.set(_JOB_KEY, job.to_json())
        self._is_published = True

    def run_dir_before(self) -> Path | None:
        """The folder of the job before torchrun has started the ranks again; None where it has not, or there was no
        job. The default folder has the time in its name: each attempt would have run in one of its own."""
        return Path(self._lasting.get(_RUN_DIR_KEY).decode()) if self._lasting.check([_RUN_DIR_KEY]) else None

    def prepare_data(self, job: Job) -> None:
        """Let each machine prepare the job's data if it is not ready there, and wait until all have it.

        Raises:
            ConfigError: a machine cannot; on all ranks.
            CommError: nothing was heard of one for launch.timeout_s.
        """
        store = dist.PrefixStore("data", self._store)
        prepare_everywhere(store, self._ranks, lambda: prepare_data(job.config), job.config.launch.timeout_s)

    def withdraw(self, code: int) -> None:
        """Tell the other ranks that there is no job, unless there is one, and why: this process is to end with `code`.

        After a failure it waits, not for long, until they have heard: the torchrun of its machine ends with it, and the
        store with torchrun. The others ended in mid-read, with frames of C++ (2026-11-23).
        """
        if self._is_published:  # torch would tell, with frames of C++, of a store that has ended since
            return
        message = {
            exits.COMPLETED: _NO_JOB,
            exits.CONFIG_PROBLEM: _REFUSED + "rank 0 refused the settings; its terminal says why",
        }.get(code, _FAILED + "rank 0 ended before it sent the other ranks a job; its terminal says why")
        with suppress(dist.DistError):  # torchrun was killed, and its store is gone
            if not self._store.check([_JOB_KEY]):
                self._store.set(_JOB_KEY, message)
            if code in (exits.CONFIG_PROBLEM, exits.FAILED):
                self._receipts.set("0", "")
                self._end_in_order()

    def receive(self) -> Job | None:
        """Wait for the job of rank 0, which may prepare the data for long; None if there is no job.

        Raises:
            ConfigError: it has refused the job, its settings or a command line that differs.
            CommError: rank 0 has not come, or has failed.
        """
        try:
            with words_of_config():
                await_ranks(self._arrivals, self._ranks, [0], _own_timeout_s())
            while not self._store.check([_JOB_KEY]):
                time.sleep(_POLL_S)
            message = self._store.get(_JOB_KEY).decode()
            self._receipts.set(str(self._ranks.rank), "")
        except dist.DistError as error:
            raise CommError("rank 0 and its store ended before it sent the other ranks a job") from error
        for prefix, kind in ((_REFUSED, ConfigError), (_FAILED, CommError)):
            if message.startswith(prefix):
                self._end_in_order()
                raise kind(message.removeprefix(prefix))
        return None if message == _NO_JOB else Job.from_json(message)

    def _end_in_order(self) -> None:
        """Wait until all ranks have heard of the missing job, then for the ranks that are to end before this one: the
        first of each machine says why, torchrun ends the others with it, and rank 0 keeps the store for all of them."""
        with suppress(CommError, dist.DistError):
            await_ranks(self._receipts, self._ranks, range(self._ranks.world_size), _HEARING_S)
        if self._ranks.local_rank > 0:
            time.sleep(_PEER_HEAD_START_S)
        elif self._ranks.rank == 0:
            time.sleep(_STORE_LASTS_S)


@functools.cache
def job_exchange(ranks: RankEnvironment) -> JobExchange:
    """The one of this process."""
    return JobExchange(ranks)


def _own_timeout_s() -> float:
    """How long to wait for rank 0, which knows the config: by this rank's own command line."""
    values = [argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith("launch.start_timeout_s=")]
    with suppress(ValueError, IndexError):
        if 0 < float(values[-1]) <= _MAX_TIMEOUT_S:  # rank 0 refuses what is no number of seconds
            return float(values[-1])
    return LaunchConfig().start_timeout_s


def run_here(job: Job, ranks: RankEnvironment) -> dict[str, Any]:
    """Run this process's rank of the job; end the process if the job does not complete."""
    if ranks.local_rank == 0:
        job.complete_folder()
    # The rank's own output goes to its log from here on.
    terminal = LastingStream(os.fdopen(os.dup(sys.stderr.fileno()), "w"))
    settle = functools.partial(_settle, job, ranks, terminal)
    try:
        result = run_rank(job, ranks, settle)
        if job.evaluates is not None and ranks.local_rank == 0:
            _remove_folder(job)
        return result
    except KeyboardInterrupt:
        # All ranks hear of a stop before one is gone, or its end would be taken for the cause of theirs.
        _end(settle, _STOP_HEAD_START_S, exits.of_signal(signal.SIGINT))
    except (Exception, SystemExit) as error:  # its traceback is in the log
        if ranks.local_rank == 0:
            _let_torchrun_end(ranks, terminal)
            if isinstance(error, CorruptionError) and job.config.train.on_corruption == "drop":
                own = range(ranks.rank, ranks.rank + ranks.local_world_size)
                if any(rank in own for rank in error.facts["ranks"]):
                    settle()
                    print("train.on_corruption=drop: this host leaves the run", file=terminal, flush=True)
                    os.kill(os.getppid(), signal.SIGTERM)  # torchrun, which would start its ranks again
        # Torchrun takes the first process to end for the root cause: let the rank of the cause go first.
        wait_s = _PEER_HEAD_START_S if Failure.from_error(error, ranks.rank).from_peers else 0.0
        _end(settle, wait_s, exits.of_failure(error))


def _remove_folder(job: Job) -> None:
    """Remove the folder of an evaluation, once the other ranks of this machine have left it."""
    while any(is_alive for _, is_alive in read_states(job.ranks_dir)):
        time.sleep(_POLL_S)
    shutil.rmtree(job.run_dir, ignore_errors=True)


def _end(settle: Callable[[], None], wait_s: float, code: int) -> NoReturn:
    """End this process `wait_s` after it has said why, and say it again if more is known then."""
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    settle()
    if wait_s:
        time.sleep(wait_s)
        settle()
    exit_now(code)


def _let_torchrun_end(ranks: RankEnvironment, terminal: LastingStream) -> None:
    """Have torchrun end after this process, where it has several hosts and no restart left. With `--rdzv-backend=c10d`
    the torchrun of a host with a pulled cable waits for its store without a limit, a quarter of an hour; no option or
    signal but SIGKILL ends the wait (torch 2.13, 2026-11-24)."""
    restarts_left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - num_restarts()
    if ranks.starter != "torchrun" or ranks.local_world_size == ranks.world_size or restarts_left > 0:
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # it is no torchrun that has set the variables
        return
    arguments = [str(value) for value in (os.getpid(), os.getppid(), _TORCHRUN_LIMIT_S, _KILLED)]
    with suppress(OSError):
        subprocess.Popen(
            ["sh", "-c", _END_TORCHRUN, *arguments],
            stdin=subprocess.DEVNULL,
            stderr=terminal.fileno(),
            start_new_session=True,
        )


def _settle(job: Job, ranks: RankEnvironment, terminal: LastingStream) -> None:
    """Say in result.json why the job ended, and a new cause on the terminal.

    Every rank does, one at a time, since only the last to end has seen all causes. Without the lock a rank read before
    the cause was there, and wrote "stopped" after another had told it (2026-11-21).
    """
    if not job.ranks_dir.is_dir():
        if ranks.rank == 0:
            print(lost_folder(job.run_dir), file=terminal, flush=True)
        return
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or none of ours is there
            lock(stack.enter_context(open_lock(job.ranks_dir / "ending.lock")), wait=True)
        failure = first_failure(job.ranks_dir)
        was_stopped = failure is None or failure.stopped_by is not None
        error = None if failure is None else failure.as_error(job.ranks_dir)
        cause = "stopped by a signal" if error is None else str(error)
        # Each of several hosts has a torchrun of its own, and a terminal.
        by_host = ranks.starter == "torchrun" and ranks.local_world_size < ranks.world_size
        cause_path = job.ranks_dir / (f"ending.{ranks.rank - ranks.local_rank}.txt" if by_host else "ending.txt")
        if failure is not None and _is_new(cause, cause_path, is_own=failure.rank == ranks.rank):
            print(cause, file=terminal, flush=True)
        with suppress(OSError):  # a full disk, which may be the cause
            name = "SIGTERM" if failure is None or failure.stopped_by is None else failure.stopped_by
            code = exits.of_signal(signal.Signals[name]) if was_stopped else exits.of_failure(error)
            write_ending(job, ranks.world_size, status="stopped" if was_stopped else "failed", error=cause, code=code)


def _is_new(cause: str, path: Path, is_own: bool) -> bool:
    """Whether no rank has told this cause yet; on a full disk, where none can note it, whether it is this rank's."""
    try:
        with open(path, "a+", opener=only_regular) as file:
            file.seek(0)
            if file.read() == cause:
                return False
            file.truncate(0)
            file.write(cause)
    except (OSError, ValueError):
        return is_own
    return True
