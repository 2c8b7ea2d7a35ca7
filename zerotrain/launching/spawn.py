"""Starting the ranks of a job on this machine, and waiting for them."""

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zerotrain.comm.environment import STORE_VARIABLE
from zerotrain.errors import ZeroTrainError
from zerotrain.launching import exits
from zerotrain.launching.failures import first_failure, lost_folder
from zerotrain.launching.job import Job, num_threads_per_rank
from zerotrain.launching.signals import handlers_restored

RANK_MODULE = "zerotrain.launching.rank_process"


def run_ranks(job: Job, num_ranks: int) -> None:
    """Start the ranks and wait until all have ended. Whatever happens, none is left.

    Raises:
        RunError, ConfigError: the first cause of the failure of a rank.
        KeyboardInterrupt: Ctrl-C; SystemExit: another signal to stop.
    """
    # Only its owner may read what lies there.
    with tempfile.TemporaryDirectory(prefix="zerotrain_") as agent_dir, _rank_environment(job, num_ranks, agent_dir):
        launch = elastic_launch(_launch_config(num_ranks, agent_dir), sys.executable)
        # A file of their own: two runs in one folder once trained the config.yaml of the later one (2026-11-21).
        job_path = Path(agent_dir) / "job.json"
        job_path.write_text(job.to_json())
        try:
            with _quiet_agent(), handlers_restored():
                launch("-m", RANK_MODULE, str(job_path))
            if (failure := _failure(job, {})) is not None:
                raise failure
        except ChildFailedError as error:
            raise (_failure(job, error.failures) or error) from error
        except SignalException as error:
            # It is an Exception: to Hydra a failed job, after which a sweep would go on with the next.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            print(f"stopped by {error.sigval.name}", file=sys.stderr)
            raise SystemExit(exits.of_signal(error.sigval)) from error
        finally:
            Console().show_cursor(True)  # which the progress bar of a killed rank 0 leaves hidden


def _failure(job: Job, ended: dict[int, ProcessFailure]) -> ZeroTrainError | None:
    """The first cause of the run's end; None where it has completed. A rank that has ended before its work was done is
    found though its exit code was 0, as by os._exit(0)."""
    if not job.ranks_dir.is_dir():
        return lost_folder(job.run_dir)
    failure = first_failure(job.ranks_dir, ended)
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
        max_restarts=0,
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
