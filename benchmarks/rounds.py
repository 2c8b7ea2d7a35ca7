"""Runs the engines in turn, round after round, each time on fresh ranks."""

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.network import Network
from benchmarks.rank import MEASURE, REST, RankResult
from benchmarks.results import Measurement, over_ranks
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import Workload

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800.0
POLL_S = 0.05
MAX_ATTEMPTS = 5
QUIET_WAIT_S = 300.0
STACKS_WAIT_S = 5.0
NUM_LINES_WITH_STACKS = 120


def interleaved(engines: list[T], num_rounds: int) -> list[T]:
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
    deadline_s = time.monotonic() + timeout_s
    with Ranks(engine, workload, network, others_are_fake=others_are_fake) as ranks:
        measured = ranks.measure(timeout_s)
        ranks.end(deadline_s - time.monotonic())
    return measured


class Ranks:
    """The ranks of one engine: their start, and what they are asked for. A context, which ends them.

    Args:
        others_are_fake: start rank 0 alone, in a fake process group.
    """

    def __init__(self, engine: str, workload: Workload, network: Network, *, others_are_fake: bool = False) -> None:
        self.engine = engine
        self._workload, self._network = workload, network
        self._folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        self._num_asked = 0
        self._processes: list[subprocess.Popen[str]] = []
        port = free_port()
        try:
            for rank in range(1 if others_are_fake else workload.num_ranks):
                self._processes.append(self._start(rank, port, others_are_fake))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, timeout_s: float) -> Measurement:
        """What all ranks measure once they have begun to train, or rested.

        Raises:
            BenchmarkError: a rank failed, or it took longer; the message ends with a rank's last output.
        """
        watch = _LoadWatch(self._processes)
        answers = self._answers(MEASURE, timeout_s)
        return over_ranks(
            self.engine,
            [RankResult(**each) for each in answers],
            num_interfaces=len(self._network.hosts),
            num_steps=self._workload.num_steps,
            other_load=watch.other_load(),
        )

    def rest(self, timeout_s: float) -> None:
        """Let them have begun to train, and give up what memory of the device they do not need for now.

        Raises:
            BenchmarkError: as `measure`.
        """
        self._answers(REST, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Let them end by themselves.

        Raises:
            BenchmarkError: as `measure`.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        self._wait(lambda: all(process.poll() == 0 for process in self._processes), timeout_s)

    def _answers(self, wish: str, timeout_s: float) -> list[Any]:
        """Ask all ranks, and wait."""
        self._num_asked += 1
        files = [self._folder / f"{rank}.{self._num_asked}.json" for rank in range(len(self._processes))]
        for process, file in zip(self._processes, files, strict=True):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # a rank that has failed, which the wait finds
                process.stdin.write(f"{wish} {file}\n")
                process.stdin.flush()
        self._wait(lambda: all(file.exists() for file in files), timeout_s)
        return [json.loads(file.read_text()) for file in files]

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Until it is done, or a rank has failed."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            codes = [process.poll() for process in self._processes]
            if failed := [rank for rank, code in enumerate(codes) if code]:
                tail = self._last_output(failed[0])
                raise BenchmarkError(
                    f"{self.engine}: rank {failed[0]} ended with exit code {codes[failed[0]]}:\n{tail}"
                )
            if time.monotonic() > deadline_s:
                waiting = codes.index(None)
                _ask_for_stacks(self._processes[waiting])
                tail = self._last_output(waiting, num_lines=NUM_LINES_WITH_STACKS)
                raise BenchmarkError(f"{self.engine}: no result of rank {waiting} after {timeout_s:.0f} s:\n{tail}")
            time.sleep(POLL_S)

    def _last_output(self, rank: int, num_lines: int = 30) -> str:
        return "\n".join(self._log_file(rank).read_text(errors="replace").splitlines()[-num_lines:])

    def _log_file(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.log"

    def _start(self, rank: int, port: int, others_are_fake: bool) -> "subprocess.Popen[str]":
        workload, network = self._workload, self._network
        host = network.host_of(rank, workload.num_ranks)
        job = {
            "engine": self.engine,
            "workload": asdict(workload),
            "others_are_fake": others_are_fake,
            "interface": host.interface,
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
        with open(self._log_file(rank), "wb") as log:
            return subprocess.Popen(
                [*host.command_prefix, sys.executable, "-m", "benchmarks.rank", json.dumps(job)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
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


def _ask_for_stacks(process: "subprocess.Popen[str]") -> None:
    """End a rank so that it writes where each of its threads is: see `faulthandler` in `rank.main`."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STACKS_WAIT_S)


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
    """Tells what share of the cores something else used since the watch was made.

    Args:
        children: of this process, which run on.
    """

    def __init__(self, children: Sequence["subprocess.Popen[str]"] = ()) -> None:
        self._children = children
        self._start = self._reading()

    def other_load(self) -> float:
        wall_s, busy_s, own_s = (now - then for now, then in zip(self._reading(), self._start, strict=True))
        return max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))

    def _reading(self) -> tuple[float, float, float]:
        """Seconds: wall clock, all cores' work, that of this process and its children, those that have ended too."""
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        own_s = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            own_s += usage.ru_utime + usage.ru_stime
        for child in self._children:
            with suppress(FileNotFoundError):
                after_name = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2]
                own_s += sum(map(int, after_name.split()[11:15])) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), (user + nice + system) / os.sysconf("SC_CLK_TCK"), own_s
