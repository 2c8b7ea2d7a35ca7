"""A fork server: a process with torch imported, and nothing else done. Its forks, the ranks, import nothing again.

A forked rank has, of the launcher, what a new Python would have: the environment, the search path and the CPU cores as
they are when it is started, the working folder, standard input, output and error. It has a session of its own, default
signal handlers (an ignored signal stays ignored), no other open file, and random generators of its own. Its memory is
that of the launcher right after the imports, shared until one of the two writes to it. Torch's threads are set by
`launch.threads_per_rank`; numpy's linear algebra has one thread (`imports.importing`).
"""

import atexit
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from zerotrain.comm.environment import STORE_VARIABLE
from zerotrain.device.processes import end_with_parent, may_fork
from zerotrain.launching import exits, failures, rank_process, resuming
from zerotrain.launching.job import Job, num_threads_per_rank
from zerotrain.training.request import StopRequest, stop_requests

_STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class _Start:
    """A request for a rank."""

    job_path: str
    environment: dict[str, str]
    cores: set[int] | None
    """CPU cores; None where the system does not tell."""
    standard: list[int]
    """Those of standard input, output and error that are open; sent along, behind the working folder."""


class ForkServer:
    """The fork server of this process; it ends with the process. Python's own (`multiprocessing.forkserver`) is a new
    interpreter, and would import torch once more."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._pid, owner = os.fork(), os.getpid()
        if self._pid == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        self._socket, self._messages = ours, Connection(os.dup(ours.fileno()))
        self._ranks: dict[int, ForkedRank] = {}
        self.is_gone = False
        atexit.register(self._end, owner)

    def start(self, job_path: str, environment: dict[str, str]) -> "ForkedRank | None":
        """Fork a rank; None where the server is gone, as after `kill -9`.

        Raises:
            OSError: no process is to be had.
        """
        folder = os.open(".", os.O_RDONLY)
        try:
            standard = [descriptor for descriptor in _STANDARD if _is_inherited(descriptor)]
            cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
            socket.send_fds(self._socket, [b"\0"], [folder, *standard])
            self._messages.send(_Start(job_path, environment, cores, standard))
        except OSError:
            self._lose()
        finally:
            os.close(folder)
        while not self.is_gone:
            kind, number = self.take_in(None)
            if kind == "refused":
                raise OSError(number, os.strerror(number))
            if kind == "started":
                self._ranks[number] = rank = ForkedRank(self, number)
                return rank
        return None

    def take_in(self, timeout_s: float | None) -> tuple[str | None, int]:
        """Take in one message; return its kind and a number, (None, 0) where none comes in time."""
        try:
            if not self._messages.poll(timeout_s):
                return None, 0
            kind, number, code = self._messages.recv()
        except (OSError, EOFError):
            self._lose()
            return None, 0
        if kind == "ended":
            self._ranks.pop(number).code = code
        return kind, number

    def _lose(self) -> None:
        """The server was killed, and its ranks with it."""
        self.is_gone = True
        for rank in self._ranks.values():
            rank.code = -signal.SIGKILL
        self._ranks.clear()

    def _end(self, owner: int) -> None:
        """End the server with its owner, but not with a fork of the owner."""
        if os.getpid() == owner:
            self._socket.close()
            self._messages.close()
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


class ForkedRank:
    """A rank of the fork server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative where a signal has ended it; None while it runs."""
        while self.code is None and self._server.take_in(0.0)[0]:
            pass
        return self.code


RankProcess = ForkedRank | subprocess.Popen[bytes]
"""A rank that was started, by a fork or as a new Python."""
_opened: list[ForkServer] = []


def open_fork_server() -> None:
    """Fork the server of the ranks, once in a process; nothing if this is not safe, or torchrun has started the ranks.

    To be called when torch is imported and before anything runs: threads are lost by a fork, and their locks are held
    for ever.
    """
    if not _opened and "RANK" not in os.environ and may_fork():
        with suppress(OSError):  # no process is to be had: it will be said of the ranks
            _opened.append(ForkServer())


def fork_server() -> ForkServer | None:
    """The one of this process; None where there is none, or none any more."""
    return next((server for server in _opened if not server.is_gone), None)


def _is_inherited(descriptor: int) -> bool:
    """Whether a new program would have this file; where standard input is closed, another file may have its number."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _serve(requests: socket.socket) -> NoReturn:
    """Fork ranks and tell how they end, until the launcher is gone."""
    try:
        end_with_parent()
        os.setsid()  # no signal of the launcher's terminal comes here
        woken, wakes = socket.socketpair()  # the end of a rank writes to it: the server sleeps while ranks train
        _close_all_but(requests, woken, wakes)
        handlers = {signum: signal.getsignal(signum) for signum in (*exits.STOP_SIGNALS, signal.SIGCHLD)}
        for signum in exits.STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        for end in (woken, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        messages, running, server = Connection(os.dup(requests.fileno())), set[int](), os.getpid()
        while True:
            if requests in wait([requests, woken]):
                prefix, files, _, _ = socket.recv_fds(requests, 1, 1 + len(_STANDARD))
                if not prefix:
                    break
                request = messages.recv()
                try:
                    pid = os.fork()
                except OSError as error:
                    messages.send(("refused", error.errno or 0, 0))
                else:
                    if pid == 0:
                        for connection in (requests, messages, woken, wakes):
                            connection.close()
                        _become_rank(request, files, handlers, server)
                    running.add(pid)
                    messages.send(("started", pid, 0))
                for file in files:
                    os.close(file)
            with suppress(BlockingIOError):
                woken.recv(4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    messages.send(("ended", pid, os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


def _close_all_but(*sockets: socket.socket) -> None:
    """Close the files of the launcher. Their numbers stay taken: an object may still believe to own one, and would
    close another file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (int(name) for name in os.listdir("/proc/self/fd")):
        if descriptor not in (*_STANDARD, nothing, *(end.fileno() for end in sockets)):
            with suppress(OSError):  # the listing's own
                os.dup2(nothing, descriptor)


def _become_rank(request: _Start, files: Sequence[int], handlers: dict[signal.Signals, Any], server: int) -> NoReturn:
    """Turn this fork of the server into a rank, run it, and end as Python ends."""
    code = 1
    try:
        end_with_parent()
        if os.getppid() != server:  # gone before that
            os._exit(code)
        signal.set_wakeup_fd(-1)
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL)
        os.setsid()
        folder, *standard = files
        os.fchdir(folder)
        for descriptor, received in zip(request.standard, standard, strict=True):
            os.dup2(received, descriptor)
        for file in files:
            os.close(file)
        if request.cores is not None:
            os.sched_setaffinity(0, request.cores)
        _forget_launcher()
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[:] = request.environment["PYTHONPATH"].split(os.pathsep)
        sys.argv = [rank_process.__file__, request.job_path]
        rank_process.main(request.job_path)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        exits.end_as_python(code)


def _forget_launcher() -> None:
    """Undo in this process what Hydra and the launcher have set, and draw new random numbers: Python's own generator
    does so by itself, torch's begins with a constant."""
    sys.modules["__main__"] = rank_process
    tempfile.tempdir = None  # what TMPDIR was when it was asked first
    sys.stdin = sys.__stdin__
    # They are None in a launcher started without output; the numbers lead nowhere then (`outlast_readers`).
    sys.stdout = sys.__stdout__ or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ or os.fdopen(2, "w", closefd=False)
    for handler in list(logging.root.handlers):
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()


# Starting the ranks of a job on this machine, and waiting for them.


RANK_MODULE = "zerotrain.launching.rank_process"
_LOOK_EVERY_S = 0.05
_AT_ONCE = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the ranks themselves, and at once."""
_GRACE_S = 30.0
"""Time for a rank between the signal to end and SIGKILL."""
_REMOVE_BEHIND_US = 'read _; for second in 1 2 3 4 5; do rm -rf "$0" && exit; sleep 1; done'
"""Shell command to remove a folder after the end of this process: ranks may still write there while they end."""


def run_ranks(attempts: resuming.Attempts, num_ranks: int) -> int:
    """Start the ranks and wait until all have ended; after a failure start them again, as often as the config allows.
    No rank is left at the end, in any case.

    The first signal to stop goes to the ranks: they end together and have all the time they need. They are ended at
    once if not all of them are at work yet or they evaluate, and by a second signal.

    Returns:
        The signal to stop, if one has come and let them end, or not kept them from completing; 0 for none.

    Raises:
        RunError, ConfigError: the first cause of the failure of a rank.
        KeyboardInterrupt: Ctrl-C; SystemExit: another signal to stop; the ranks were ended at once.
    """
    job = attempts.job

    def tell(signum: int) -> bool:
        is_in_order = signum not in _AT_ONCE and job.evaluates is None
        return is_in_order and failures.pass_on(job.ranks_dir, num_ranks, signum)

    with stop_requests(tell, _AT_ONCE) as stop:
        while True:
            try:
                _run_once(attempts.job, num_ranks, stop)
                return stop.signum
            except failures.RunError as error:
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
            codes = _codes_of_first_to_fail(job, job_path, num_ranks, stop)
        finally:
            Console().show_cursor(True)  # which the progress bar of a killed rank 0 leaves hidden
        if not job.ranks_dir.is_dir():
            raise failures.lost_folder(job.run_dir)
        # A rank may have ended before its work was done with exit code 0, as by os._exit(0).
        failure = failures.first_failure(job.ranks_dir, codes, by_user=stop.signum != 0)
        if failure is not None and failure.stopped_by is not None:
            # This signal told one rank to stop before all could end in order: it has told the run.
            raise _ended_at_once(signal.Signals[failure.stopped_by])
        if failure is not None:
            raise failure.as_error(job.ranks_dir)
        if codes:
            raise KeyboardInterrupt  # told to stop when not all were in their training


def _codes_of_first_to_fail(job: Job, job_path: Path, num_ranks: int, stop: StopRequest) -> dict[int, int]:
    """Start the ranks and wait until all have ended, or one has failed; end the rest. Return the exit codes, by rank,
    of the failed ones, and of the ones killed by others meanwhile; none if all have completed."""
    ranks: list[RankProcess] = []
    try:
        for rank in range(num_ranks):
            environment = _environment(job, rank, num_ranks, job_path.parent)
            # GPUs need a new Python, not a fork.
            server = None if job.config.launch.device == "cuda" else fork_server()
            forked = server.start(str(job_path), environment) if server else None
            command = [sys.executable, "-m", RANK_MODULE, str(job_path)]
            ranks.append(forked or subprocess.Popen(command, env=environment, start_new_session=True))
        while True:
            codes = _codes_of(ranks)
            failed = {rank: code for rank, code in codes.items() if code != 0}
            if failed or len(codes) == num_ranks:
                break
            time.sleep(_LOOK_EVERY_S)
    finally:
        sent = _end(ranks, stop.signum if stop.signum in _AT_ONCE else signal.SIGTERM)
    # Ranks are killed one after the other if memory runs out.
    killed = {rank: code for rank, code in _codes_of(ranks).items() if code < 0 and -code not in sent}
    return failed and killed | failed


def _codes_of(ranks: Sequence[RankProcess]) -> dict[int, int]:
    """The exit codes of the ended ones, by rank."""
    return {rank: code for rank, process in enumerate(ranks) if (code := process.poll()) is not None}


def _signal(rank: RankProcess, signum: int) -> None:
    """Signal a running rank and the processes it has started: each rank has a process group of its own."""
    with suppress(ProcessLookupError):
        try:
            os.killpg(rank.pid, signum)
        except ProcessLookupError:  # forked just now, it has no group yet
            os.kill(rank.pid, signum)


def _end(ranks: Sequence[RankProcess], signum: int) -> set[int]:
    """End the running ranks: by this signal, and by SIGKILL `_GRACE_S` later or when another signal comes.

    Returns:
        The signals sent.
    """
    kill_s = time.monotonic() + _GRACE_S
    interruption: BaseException | None = None
    sent = {signum}
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        _signal(process, signum)
    while running := [process for process in running if process.poll() is None]:
        try:
            if time.monotonic() > kill_s:
                kill_s = math.inf
                sent.add(signal.SIGKILL)
                for process in running:
                    _signal(process, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)
        except KeyboardInterrupt as error:
            interruption, kill_s = error, 0.0
    if interruption is not None:
        raise interruption
    return sent


@contextmanager
def ranks_folder() -> Iterator[str]:
    """A folder in TMPDIR that only its owner may read; this process and its ranks meet there. It is removed with this
    process, after any end: `kill -9` left it, with the job in it (2026-11-23)."""
    with tempfile.TemporaryDirectory(prefix="zerotrain_") as folder:
        remover = None
        with suppress(OSError):  # no process to be had: it is removed but for kill -9
            # In a session of its own: no Ctrl-C reaches it.
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
    """The exception to raise after this signal has ended the ranks at once. It is none that Hydra takes for a failed
    job: a sweep would go on with the next."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt()
    print(f"stopped by {signal.Signals(signum).name}", file=sys.stderr)
    return SystemExit(exits.of_signal(signum))


def _environment(job: Job, rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    """The environment of a rank: torchrun's variables, and the private place where the ranks meet."""
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
