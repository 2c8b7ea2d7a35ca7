"""Runs the engines in turn, round after round, each time on fresh ranks."""

import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.network import Network
from benchmarks.rank import RankResult
from benchmarks.results import Measurement, over_ranks
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import Workload

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800.0
POLL_S = 0.05
MAX_ATTEMPTS = 5
QUIET_WAIT_S = 300.0
STACKS_WAIT_S = 5.0
NUM_LINES_WITH_STACKS = 120


def interleaved(engines: list[str], num_rounds: int) -> list[str]:
    """Every engine once a round; each round begins with another one, so that drift hits all alike."""
    rounds = (engines[index % len(engines) :] + engines[: index % len(engines)] for index in range(num_rounds))
    return [engine for each in rounds for engine in each]


def measure_in_quiet(
    engine: str, workload: Workload, network: Network, max_load: float, limit: TimeLimit
) -> Measurement:
    """Measure while others use at most `max_load`, a share of the machine.

    Waits for that, QUIET_WAIT_S at most, and measures again if they used more meanwhile, MAX_ATTEMPTS times in all;
    the quietest counts.

    Raises:
        BenchmarkError: a rank failed, or the limit is reached.
    """
    runs: list[Measurement] = []
    while not runs or (runs[-1].other_load > max_load and len(runs) < MAX_ATTEMPTS and limit.has_room_for(engine)):
        _wait_until_quiet(max_load, min(QUIET_WAIT_S, limit.left_s))
        with limit.timed(engine):
            runs.append(measure(engine, workload, network, timeout_s=min(TIMEOUT_S, limit.run_s)))
    return min(runs, key=lambda run: run.other_load)


def measure(
    engine: str,
    workload: Workload,
    network: Network,
    *,
    others_are_fake: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Measurement:
    """Start fresh ranks, wait for them, and put together what they measured.

    Args:
        others_are_fake: start rank 0 alone, in a fake process group.
        timeout_s: seconds until the ranks are ended.

    Raises:
        BenchmarkError: a rank failed, or they took too long; the message ends with a rank's last output.
    """
    num_started = 1 if others_are_fake else workload.num_ranks
    watch = _LoadWatch()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            port = free_port()
            for rank in range(num_started):
                ranks.append(_start_rank(rank, port, engine, workload, network, Path(folder), others_are_fake))
            _wait(ranks, engine, Path(folder), timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = [json.loads(_result_file(Path(folder), rank).read_text()) for rank in range(num_started)]
    return over_ranks(
        engine,
        [RankResult(**result) for result in results],
        num_interfaces=len(network.hosts),
        num_steps=workload.num_steps,
        other_load=watch.other_load(),
    )


def machine() -> str:
    """The machine and the software, in one line."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores{gpu}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, Linux {platform.release()}"
    )


def _start_rank(
    rank: int, port: int, engine: str, workload: Workload, network: Network, folder: Path, others_are_fake: bool
) -> subprocess.Popen[bytes]:
    host = network.host_of(rank, workload.num_ranks)
    job = {
        "engine": engine,
        "workload": asdict(workload),
        "others_are_fake": others_are_fake,
        "interface": host.interface,
        "result": str(_result_file(folder, rank)),
    }
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workload.num_ranks),
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": workload.device,
    }
    if workload.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
        environment["GLOO_SOCKET_IFNAME"] = host.interface or "lo"
    with open(_log_file(folder, rank), "wb") as log:
        return subprocess.Popen(
            [*host.command_prefix, sys.executable, "-m", "benchmarks.rank", json.dumps(job)],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], engine: str, folder: Path, timeout_s: float) -> None:
    """Until all ranks have ended, or one has failed."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            code, tail = codes[failed[0]], _last_output(folder, failed[0])
            raise BenchmarkError(f"{engine}: rank {failed[0]} ended with exit code {code}:\n{tail}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            waiting = codes.index(None)
            _ask_for_stacks(ranks[waiting])
            tail = _last_output(folder, waiting, num_lines=NUM_LINES_WITH_STACKS)
            raise BenchmarkError(f"{engine}: no result of rank {waiting} after {timeout_s:.0f} s:\n{tail}")
        time.sleep(POLL_S)


def _ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """End a rank so that it writes where each of its threads is: see `faulthandler` in `rank.main`."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STACKS_WAIT_S)


def _last_output(folder: Path, rank: int, num_lines: int = 30) -> str:
    return "\n".join(_log_file(folder, rank).read_text(errors="replace").splitlines()[-num_lines:])


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def _wait_until_quiet(max_load: float, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while max_load < 1 and time.monotonic() < deadline_s:
        watch = _LoadWatch()
        time.sleep(1)
        if watch.other_load() <= max_load:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _LoadWatch:
    """Tells what share of the cores something else used since the watch was made."""

    def __init__(self) -> None:
        self._start = self._reading()

    def other_load(self) -> float:
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._reading(), self._start, strict=True))
        return max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))

    @staticmethod
    def _reading() -> tuple[float, float, float]:
        """Seconds: wall clock, all cores' work, this process's and its ended children's work."""
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        own_s = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            own_s += usage.ru_utime + usage.ru_stime
        return time.monotonic(), (user + nice + system) / os.sysconf("SC_CLK_TCK"), own_s
