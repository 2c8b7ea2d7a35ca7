"""The work of one rank, however it was started."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler

from zerotrain.comm.environment import RankEnvironment
from zerotrain.comm.ledger import tell_log
from zerotrain.errors import CommError
from zerotrain.files import suspension, untrusted
from zerotrain.files.terminal import LastingStream, StampedLines, StandIn, escape_what_cannot_be_written
from zerotrain.launching import exits, failures
from zerotrain.launching.job import Job, num_threads_per_rank
from zerotrain.launching.presence import Presence, continue_stopped, seen_alive
from zerotrain.run import factory

# The log of a rank: its output goes to ranks/<rank>.log, and the output of rank 0 to the terminal as well.


_MOVES_THE_CURSOR = re.compile(r"\r|\x1b\[[\d;]*[A-K]|\x1b\[\?")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class TerminalAndFile(StandIn):
    """Writes to both. It answers questions as the terminal would: a progress bar works as if there were no file.

    The file gets whole lines, without colours, and nothing of a line drawn again and again.
    """

    def __init__(self, terminal: Any, file: Any) -> None:
        super().__init__(terminal)
        self._file = file
        self._unfinished_line = ""

    def write(self, text: str) -> int:
        """Write to both."""
        if _MOVES_THE_CURSOR.search(text):
            self._unfinished_line = ""
        else:
            lines, newline, self._unfinished_line = (self._unfinished_line + text).rpartition("\n")
            self._file.write(_COLOUR.sub("", lines + newline))
        num_chars: int = self._stream.write(text)
        self._stream.flush()
        return num_chars

    def flush(self) -> None:
        """Flush both."""
        self._file.flush()
        self._stream.flush()


def open_rank_log(ranks_dir: Path, rank: int, append: bool = False) -> StampedLines:
    """Send this process's output to its log from here on; return the log. Rank 0 keeps its terminal too.

    Each line that Python prints begins with its time. Lines of C++ have none: a process between it and the file would
    be one more to outlive a rank that is killed.

    Args:
        append: keep what is there, of the same rank before its run was started again.
    """
    ranks_dir.mkdir(parents=True, exist_ok=True)
    path = ranks_dir / f"{rank}.log"
    file = open(  # noqa: SIM115 - open until the process ends
        path, "a" if append else "w", 1, encoding="utf-8", errors="backslashreplace", opener=untrusted.only_regular
    )
    log = StampedLines(file)
    for stream in (sys.stdout, sys.stderr):
        escape_what_cannot_be_written(stream)
    if rank == 0:
        sys.stdout = TerminalAndFile(LastingStream(sys.stdout), log)
        sys.stderr = TerminalAndFile(LastingStream(sys.stderr), log)
    else:
        # By descriptor: the output of C++ goes there as well.
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
        sys.stdout = sys.stderr = log
    return log


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def run_rank(job: Job, ranks: RankEnvironment, settle: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run this process's rank of a job, its output going to its log; return the body of result.json.

    An exception is passed on after its traceback is in the log and its cause in ranks/<rank>.error.json. So is an end
    of the process asked for by a user's class.

    Args:
        settle: called if the rank does not end in time after a signal to stop at once, before it is ended.
    """
    try:
        for path in job.ranks_dir.glob(f"{ranks.rank}.*error.json"):
            path.unlink()
        presence = Presence(job.ranks_dir, ranks.rank)
        failures.stop_in_order(presence.note_stop, settle)
        suspension.watch_suspensions(presence.note_suspension)
        log = open_rank_log(job.ranks_dir, ranks.rank, append=job.restarts > 0)
    except OSError as error:  # there is no file yet to leave it in
        failures.name_full_disk(error, job.run_dir)
        print(f"rank {ranks.rank}: {error}", file=sys.stderr)
        raise
    torch.set_num_threads(num_threads_per_rank(job.config, ranks.local_world_size))
    tell_torch_of_gpus(job.ranks_dir)
    # Under torchrun, what it records of an exception becomes part of torchrun's own report.
    torchrun_report = get_error_handler()
    torchrun_report.initialize()
    try:
        with exits.exits_raised():
            result = _do(job, presence, ranks.rank)
    except KeyboardInterrupt:
        presence.wait_for_note()
        presence.note_interrupt()
        raise
    except (Exception, SystemExit) as error:
        failures.name_full_disk(error, job.run_dir)
        failure = failures.Failure.from_error(error, ranks.rank, seen_alive(job.ranks_dir, ranks.rank))
        try:
            failure.write(job.ranks_dir)
            traceback.print_exc(file=log)
        except OSError:  # a full disk has room for the cause where it was taken before
            presence.fail(failure.cause)
        continue_stopped(job.ranks_dir)
        if not failure.from_peers:
            _tell_torchrun(torchrun_report, error)
        raise
    presence.leave()
    return result


def _do(job: Job, presence: Presence, rank: int) -> dict[str, Any]:
    """Train, or evaluate."""
    tell = partial(leave_overdue, job.ranks_dir, rank)
    if job.evaluates is not None:
        from zerotrain.saved import evaluating  # a training has no use for it

        return evaluating.run(job.config, job.run_dir, **job.evaluates, enter=presence.enter, tell=tell)
    return factory.run(job, presence.enter, presence.begin, tell)


def leave_overdue(ranks_dir: Path, rank: int, error: CommError | None) -> None:
    """A collective does not end on the device, and the device is about to end this process without Python: leave this
    as the rank's failure. None: it has ended after all."""
    tell_log(error)
    with suppress(OSError):
        if error is None:
            (ranks_dir / f"{rank}.overdue.error.json").unlink(missing_ok=True)
        else:
            failures.Failure.from_error(error, rank, seen_alive(ranks_dir, rank)).write(ranks_dir, "overdue.error")


def tell_torch_of_gpus(ranks_dir: Path) -> None:
    """Give collectives of GPUs the first free multiprocessors, since computation waits for them; let torch keep the
    last ones, and write them beside the logs when its watchdog ends the process; and let the memory that it reserves
    grow, since units and activations of many sizes leave holes in memory of fixed sizes. NCCL registers none of it for
    graphs: with memory that grows that hung (pytorch#158029). Variables already set stay.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    for name, value in {
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(ranks_dir / "collectives_of_rank_"),
    }.items():
        os.environ.setdefault(name, value)


def _tell_torchrun(report: ErrorHandler, error: BaseException) -> None:
    """Have torchrun's own report say what has failed; it prints whatever the exception holds, and its traceback."""
    text = untrusted.printable(str(error))
    if text == str(error):
        report.record_exception(error)
        return
    try:
        raise type(type(error).__name__, (Exception,), {})(text) from None
    except Exception as shortened:
        report.record_exception(shortened)


def exit_now(code: int) -> NoReturn:
    """End this process without its clean-up: to close a process group is to wait for ranks, and these may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the log's disk is full, or nobody reads any more
            stream.flush()
    os._exit(code)
