"""Starting the ranks of a job on this machine, and waiting for them."""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zerotrain.comm.ranks.environment import STORE_VARIABLE
from zerotrain.launching.end import exits
from zerotrain.launching.end.failures import RunError, first_failure, lost_folder
from zerotrain.launching.end.signals import handlers_restored
from zerotrain.launching.end.stopping import pass_on
from zerotrain.launching.job.job import Job, num_threads_per_rank
from zerotrain.launching.job.restarts import Attempts
from zerotrain.training.callbacks.stop import StopRequest, stop_requests

RANK_MODULE = "zerotrain.launching.start.rank_process"
_REMOVE_BEHIND_US = 'read _; for second in 1 2 3 4 5; do rm -rf "$0" && exit; sleep 1; done'
"""Of a shell whose input ends with this process: ranks that are about to end may still write there."""


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

    with handlers_restored(), stop_requests(tell) as stop:
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
    with agent_folder() as agent_dir, _rank_environment(job, num_ranks, agent_dir):
        launch = elastic_launch(_launch_config(num_ranks, agent_dir), sys.executable)
        # A file of their own: two runs in one folder once trained the config.yaml of the later one (2026-11-21).
        job_path = Path(agent_dir) / "job.json"
        job_path.write_text(job.to_json())
        try:
            with _quiet_agent():
                launch("-m", RANK_MODULE, str(job_path))
            if (failure := _failure(job, {}, stop)) is not None:
                raise failure
        except ChildFailedError as error:
            if (failure := _failure(job, error.failures, stop)) is not None or not stop.signum:
                raise failure or error from error
            raise KeyboardInterrupt from error  # told to stop when not all were in their training
        except SignalException as error:
            # It is an Exception: to Hydra a failed job, after which a sweep would go on with the next.
            raise _ended_at_once(error.sigval) from error
        finally:
            Console().show_cursor(True)  # which the progress bar of a killed rank 0 leaves hidden


@contextmanager
def agent_folder() -> Iterator[str]:
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
    """What to raise after this signal has ended the ranks at once."""
    if signum == signal.SIGINT:
        return KeyboardInterrupt()
    print(f"stopped by {signal.Signals(signum).name}", file=sys.stderr)
    return SystemExit(exits.of_signal(signum))


def _failure(job: Job, ended: dict[int, ProcessFailure], stop: StopRequest) -> BaseException | None:
    """The first cause of the run's end; None where it has completed, or was stopped. A rank that has ended before its
    work was done is found though its exit code was 0, as by os._exit(0). A signal that told one rank to stop, before
    all could end in order, has told the run."""
    if not job.ranks_dir.is_dir():
        return lost_folder(job.run_dir)
    failure = first_failure(job.ranks_dir, ended, by_user=stop.signum != 0)
    if failure is not None and failure.stopped_by is not None:
        return _ended_at_once(signal.Signals[failure.stopped_by])
    return None if failure is None else failure.as_error(job.ranks_dir)


def _launch_config(num_ranks: int, agent_dir: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        # Files in place of ports, which torch's stores open on all addresses of the machine.
        rdzv_backend="c10d",
        rdzv_configs={"store_type": "file"},
        rdzv_endpoint=str(Path(agent_dir) / "rendezvous"),
        local_addr="localhost",
        max_restarts=0,  # `run_ranks` starts them again, and says why between two attempts
        signals_to_handle="SIGHUP,SIGQUIT",  # the others it does not get: it would kill the ranks 30 s later
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=agent_dir),
    )


@contextmanager
def _rank_environment(job: Job, num_ranks: int, agent_dir: str) -> Iterator[None]:
    """What the ranks inherit: they import from where this process does, share out its cores, and meet where nobody else
    can."""
    changes = {
        "OMP_NUM_THREADS": str(num_threads_per_rank(job.config, num_ranks)),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",  # and from nowhere else: `python -m` would put the folder where the user is before all
        STORE_VARIABLE: str(Path(agent_dir) / "store"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the agent would open one beside, on all addresses
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        changes["GLOO_SOCKET_IFNAME"] = loopback.pop()
    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent warns of each process it ends; the user reads the first cause alone."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
