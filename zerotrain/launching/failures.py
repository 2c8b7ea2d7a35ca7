"""Failures of ranks, the first cause among several, and the signals to stop them."""

import _thread
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from zerotrain.comm.whereabouts import is_of_others, name_ranks, shortage
from zerotrain.errors import CallbackError, CommError, ConfigError, CorruptionError, DisagreementError, ZeroTrainError
from zerotrain.files.lock import whole
from zerotrain.files.terminal import say_at_once
from zerotrain.files.untrusted import Natural, printable, read_json
from zerotrain.launching import exits
from zerotrain.launching.presence import RankState, SignalName, clock_error, read_states
from zerotrain.training.request import SAME_REQUEST_S, StopRequest

_SIGNS_OF_LOST_PEERS = ("/gloo/", "Connection closed by peer", "Connection reset by peer")
"""In the messages of collectives in a user's own code; ours raise CommError."""
_TOLD_TO_STOP = tuple(
    code
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    for code in (-signum, exits.of_signal(signum))
)
"""Exit codes of stopped ranks: because another rank had failed, or by the user."""
_MAX_NBYTES = 2**20
"""Largest size of a file with a rank's failure."""
_OF_WAITS = ("unheard", "where", "waited_s")
"""Attributes of a CommError about a wait in vain."""
_WAKING_S = 10.0
"""A suspended rank fails within this time after it wakes, if it fails because of the suspension."""
_DECISIVE = 0.25
"""A suspension is the cause of a wait in vain if it took at least this part of the wait."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: "kill -9, or the machine ran out of memory",
    signal.SIGABRT: "by itself: on GPUs NCCL does so when ranks wait for each other longer than launch.timeout_s",
}


MAX_CAUSE = 10_000
"""Characters."""


class RunError(ZeroTrainError):
    """The ranks of a job ended without completing it."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: Natural
    cause: str
    """Completes the sentence "rank 1 ..."."""
    from_peers: bool = False
    """Whether the rank only noticed that others were gone."""
    problems: tuple[str, ...] | None = None
    """The lines of a ConfigError; a user needs no more of it."""
    time_s: float = 0.0
    """Since the epoch; once written, by the clock of the folder's file system."""
    saw_alive: Mapping[int, str] = field(default_factory=dict)
    """The other ranks with a process at that time, and where: their later end is no cause of this."""
    unheard: tuple[Natural, ...] = ()
    """The ranks awaited in vain, without a word from them."""
    where: str = ""
    """The place in the training where it waited for them."""
    waited_s: float = 0.0
    stopped_by: SignalName | None = None
    """The signal to stop for this rank alone: the others missed it."""
    subject: str = ""
    """Another subject for the sentence, such as "rank 1 on n0" or "n1 (ranks 2, 3)"."""

    @classmethod
    def from_error(cls, error: BaseException, rank: int, saw_alive: Mapping[int, str] | None = None) -> "Failure":
        """The failure of a rank that caught this exception."""
        from_peers = _comes_from_peers(error)
        message = str(error) if isinstance(error, CommError) and from_peers else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            message = f"SystemExit: the process tried to exit with code {error.code or 0} before its work was done"
        if lacking := shortage(error):
            message = f"{message}; {lacking}"
        what = f"{'lost another rank' if from_peers else 'failed'}: {message}"
        if isinstance(error, CorruptionError):
            what = f"found that {error}"
        return cls(
            rank=rank,
            cause=printable(what),
            from_peers=from_peers,
            problems=error.problems if isinstance(error, ConfigError) else None,
            time_s=time.time(),
            saw_alive=saw_alive or {},
            **({name: getattr(error, name) for name in _OF_WAITS} if isinstance(error, CommError) else {}),
        )

    def write(self, ranks_dir: Path, kind: str = "error") -> None:
        """Leave it in the folder of the ranks' logs, for `first_failure`; another rank may call that meanwhile.

        Args:
            kind: error, or overdue.error of one that may end well: each has a file of its own.
        """
        with whole(ranks_dir / f"{self.rank}.{kind}.json") as file:
            time_s = self.time_s + clock_error(Path(file.name))
            file.write(json.dumps(asdict(replace(self, time_s=time_s))).encode())

    def describe(self, ranks_dir: Path) -> str:
        """Two lines for the user: the cause and the rank's log."""
        return printable(
            f"{self.subject or f'rank {self.rank}'} {self.cause}\n  its log: {ranks_dir / f'{self.rank}.log'}",
            MAX_CAUSE,
        )

    def as_error(self, ranks_dir: Path) -> ZeroTrainError:
        """The exception to raise where the ranks were started."""
        return ConfigError(*self.problems) if self.problems else RunError(self.describe(ranks_dir))


def first_failure(ranks_dir: Path, ended: Mapping[int, int] | None = None, by_user: bool = False) -> Failure | None:
    """The first cause of a run's end; None where no rank has failed.

    Args:
        ended: the exit code of each process that has failed, by rank; negative where a signal has ended it,
            before it could write what happened. None where that is not known, and the user may have stopped the ranks.
        by_user: whether the user is known to have stopped them. A rank that ends in order and is gone before has
            failed all the same.
    """
    failures = list[Failure]()
    for path in ranks_dir.glob("*.error.json"):
        with suppress(OSError, ValueError):  # a file of somebody else
            failures.append(read_json(path, Failure, max_nbytes=_MAX_NBYTES))
    states = read_states(ranks_dir)
    failures += [Failure(state.rank, state.failed, time_s=time.time()) for state, _ in states if state.failed]
    spoke = {failure.rank for failure in failures}
    lost = [state for state, alive in states if not alive and state.rank not in spoke]
    silent = [state for state in lost if state.in_order or not state.stopped_by]
    how = "was killed or exited without an error message" if ended is None else "ended with exit code 0"
    processes = {
        state.rank: Failure(rank=state.rank, cause=f"{how} in {state.phase}, before its work was done")
        for state in silent
    }
    hosts = {state.rank: state.host for state, _ in states}
    if len(set(hosts.values())) == 1:  # then no message names it
        hosts = {}
    processes |= _host_failures(silent, hosts)
    processes |= {rank: _process_failure(rank, code) for rank, code in (ended or {}).items() if rank not in spoke}
    told_to_stop = {rank for rank, code in (ended or {}).items() if code in _TOLD_TO_STOP}
    outlived = {rank for failure in failures for rank in failure.saw_alive}
    stops = {state.rank: state for state, _ in states if state.stopped_by and not state.in_order}
    # A rank may miss another one because a signal has stopped both, the other one first.
    noticed = [
        failure
        for failure in failures
        if failure.from_peers and not (failure.rank in stops and stops[failure.rank].stopped_s <= failure.time_s)
    ]
    noticed_s = min((failure.time_s for failure in noticed), default=math.inf)
    by_user = by_user or (ended is None and not _stopped_alone(stops, noticed))
    from_peers = noticed if by_user else [failure for failure in failures if failure.from_peers]
    # A row for each kind of cause, in the order of its rank: the first kind that has a cause counts, and of its causes
    # the earliest. A further kind is a further row.
    precedence = {
        "own error": [failure for failure in failures if not failure.from_peers],
        "death": [process for rank, process in processes.items() if rank not in told_to_stop | outlived],
        # A later signal was sent because of the loss.
        "stop of one rank": [
            _stop_failure(state) for state in stops.values() if state.stopped_s <= noticed_s and not by_user
        ],
        "suspension": _suspension(from_peers, [state for state, _ in states]),
        "no answer": _unanswered(from_peers, hosts),
        "loss of others": from_peers,
        # Here also a process counts that was told to stop, or that others saw alive after its end.
        "death after a stop": [
            process for rank, process in processes.items() if not (by_user and rank in told_to_stop)
        ],
    }
    causes = next((causes for causes in precedence.values() if causes), None)
    if causes is None:
        return None
    first = min(causes, key=lambda failure: failure.time_s)
    if first.subject or first.rank not in hosts:
        return first
    return replace(first, subject=f"rank {first.rank} on {hosts[first.rank]}")


def _ranks_beside(rank: int, hosts: Mapping[int, str]) -> list[int]:
    """The ranks of a rank's host."""
    return [other for other in hosts if hosts[other] == hosts.get(rank)]


def _host_name(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    return f"{hosts[ranks[0]]} ({name_ranks(ranks)})"


def lost_folder(run_dir: Path) -> RunError:
    """The error if the run's folder is gone, and with it all files of the ranks."""
    return RunError(f"{run_dir}: the run's folder was deleted or moved during the run; start the run again")


def name_full_disk(error: BaseException, run_dir: Path) -> bool:
    """Whether a disk was full. Python names the file only if it could not be opened; otherwise the error gets the
    folder."""
    is_full = isinstance(error, OSError) and error.errno in exits.NO_ROOM
    if isinstance(error, OSError) and is_full and error.filename is None:
        error.filename = str(run_dir)
    return is_full


def _suspension(noticed: list[Failure], states: list[RankState]) -> list[Failure]:
    """The suspension of the first rank to miss others, and of the ranks suspended with it. Nothing if the first was
    awake: it has waited for another rank."""
    earliest = min(noticed, key=lambda failure: failure.time_s, default=None)
    if earliest is None:
        return []
    since_s = earliest.time_s - earliest.waited_s - _WAKING_S
    asleep = {
        state.rank: state.suspended_s
        for state in states
        if state.suspended_s > earliest.waited_s * _DECISIVE and state.suspended_until_s >= since_s
    }
    if earliest.rank not in asleep:
        return []
    cause = (
        f"was suspended for {asleep[earliest.rank]:.0f} s, which counts as waiting for other ranks: launch.timeout_s "
        "was over; give it more than a suspension takes, and go on with checkpoint.resume=auto"
    )
    subject = "the whole run" if len(asleep) == len(states) > 1 else ""
    return [Failure(rank=earliest.rank, cause=cause, time_s=earliest.time_s, subject=subject)]


def _unanswered(noticed: list[Failure], hosts: Mapping[int, str]) -> list[Failure]:
    """The first rank without a word while others waited for it, though its process was there: it was stopped, or slept.
    Or its whole host, if no other host reaches that."""
    waited = sorted((failure for failure in noticed if failure.unheard), key=lambda failure: failure.time_s)
    if not waited:
        return []
    earliest = waited[0]
    # A host cut off from this one blames it in turn, and came later.
    own = hosts.get(earliest.rank)
    with_it = [failure for failure in waited if hosts.get(failure.rank) == own or earliest.rank not in failure.unheard]
    ranks = [rank for rank in earliest.unheard if all(rank in failure.unheard for failure in with_it)]
    for rank in (rank for rank in ranks if rank in earliest.saw_alive):
        host_ranks = _ranks_beside(rank, hosts)
        waiting = f"rank {earliest.rank} on {own}" if own else f"rank {earliest.rank}"
        cause = (
            f"did not answer for {earliest.waited_s:.0f} s, last seen in {earliest.saw_alive[rank]}; "
            f"{waiting} waited in {earliest.where}"
        )
        if not host_ranks or not set(host_ranks) <= set(ranks):
            return [Failure(rank=rank, cause=cause, time_s=earliest.time_s)]
        if len({hosts.get(other) for other in ranks} - {own}) > 1:  # rather one host than all others
            rank, host_ranks = earliest.rank, _ranks_beside(earliest.rank, hosts)
            cause = f"reached no other host for {earliest.waited_s:.0f} s; rank {rank} waited in {earliest.where}"
        else:
            cause = f"is gone: {cause}"
        return [Failure(rank=rank, cause=cause, time_s=earliest.time_s, subject=_host_name(host_ranks, hosts))]
    return []


def _stopped_alone(stops: dict[int, RankState], noticed: list[Failure]) -> bool:
    """Whether a signal has stopped one rank and the others went on, until they were ended since it was gone."""
    gone_before = {rank for state in stops.values() for rank in state.gone}
    return any(
        state.rank in gone_before or any(failure.time_s > state.stopped_s for failure in noticed)
        for state in stops.values()
    )


def _stop_failure(state: RankState) -> Failure:
    cause = f"was stopped by {state.stopped_by}, which only it received, in {state.phase}"
    return Failure(rank=state.rank, cause=cause, time_s=state.stopped_s, stopped_by=state.stopped_by)


def _host_failures(silent: list[RankState], hosts: Mapping[int, str]) -> dict[int, Failure]:
    """The failures of ranks gone together with their whole host."""
    gone = {state.rank for state in silent}
    failures = {}
    for state in silent:
        host_ranks = _ranks_beside(state.rank, hosts)
        if len(host_ranks) > 1 and gone.issuperset(host_ranks):
            cause = f"is gone: killed or ended without an error message in {state.phase}, before its work was done"
            failures[state.rank] = Failure(rank=state.rank, cause=cause, subject=_host_name(host_ranks, hosts))
    return failures


def _process_failure(rank: int, code: int) -> Failure:
    if code >= 0:
        return Failure(rank=rank, cause=f"ended with exit code {code}")
    name = signal.Signals(-code).name
    hint = _HINTS.get(-code)
    return Failure(rank=rank, cause=f"was killed by {name}" + (f" ({hint})" if hint else ""))


def _comes_from_peers(error: BaseException) -> bool:
    if isinstance(error, DisagreementError) or shortage(error):
        return False
    if isinstance(error, CommError):
        return not error.is_own
    if isinstance(error, CallbackError) and error.__cause__ is not None:
        return _comes_from_peers(error.__cause__)
    if isinstance(error, dist.DistError):
        return is_of_others(error)
    # Gloo has no class of its own for what it raises.
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_LOST_PEERS)


# Handles a signal to stop: on a rank, and in the process that started the ranks.


STOP_GRACE_S = 10.0
"""A rank has this long to write its result after a signal to stop at once."""


def _stop_of_the_start(signum: int, frame: FrameType | None) -> None:
    """Does nothing: `stop_in_order` ends the process."""


def stop_in_order(note: Callable[[int, bool], bool], settle: Callable[[], None]) -> None:
    """From here on a signal to stop is noted when it comes. In the training loop the first does no more, as the
    handlers there keep the request; any other one ends the process within `STOP_GRACE_S`.

    Before the training SIGINT raises KeyboardInterrupt, and SIGTERM, SIGUSR1 and SIGUSR2 end the process at once.

    Args:
        note: told the number of each signal to stop, when it comes, and whether this rank could end in order; returns
            whether all ranks can. The launcher, or torchrun, ends the others of a rank that is gone, by SIGTERM too.
        settle: called before the process is ended here.

    The limit is kept by a thread, which reads the interpreter's wake-up socket: the signal itself writes to it. Python
    runs its own handlers between two bytecodes, so never while a collective waits for ranks that are gone.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, _stop_of_the_start)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        obeyed_s: float | None = None
        with reader, writer:
            while True:
                signum = reader.recv(1)[0]
                if signum not in exits.STOP_SIGNALS:
                    continue
                handler, now_s = signal.getsignal(signum), time.monotonic()
                request = getattr(handler, "__self__", None)
                is_same = obeyed_s is not None and now_s - obeyed_s <= SAME_REQUEST_S  # the training may be over by now
                if note(signum, is_same or (obeyed_s is None and isinstance(request, StopRequest))):
                    obeyed_s = obeyed_s or now_s
                    continue
                if isinstance(request, StopRequest) and not request.at_once:
                    request.give_up()
                    _thread.interrupt_main(signal.Signals(signum))
                if handler is not _stop_of_the_start:
                    time.sleep(STOP_GRACE_S)
                settle()
                os._exit(exits.of_signal(signum))

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


def pass_on(ranks_dir: Path, num_ranks: int, signum: int) -> bool:
    """Tell the ranks of this process, all of them at work, what it was told; each only once: a rank may have got the
    signal by itself, as from a terminal, and noted it.

    Returns:
        Whether all of them are at work. If not, none was told.
    """
    ranks = [state for state, alive in read_states(ranks_dir) if alive]
    if len(ranks) < num_ranks:
        return False
    for state in ranks:
        if state.stopped_by is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(state.pid, signum)
    say_at_once(f"{signal.Signals(signum).name}: the running step ends, then the run; once more stops at once\n")
    return True
