"""Runs launch.py the way a user does, as processes of their own, and finds what is left of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.ranks.processes import HANG_S
from tests.zygote.client import Forked, Zygote
from tests.zygote.server import MARK

REPOSITORY = Path(__file__).resolve().parents[2]
USER_CODE = Path(__file__).resolve().parent / "user_code"
TINY = (
    "launch.device=cpu",
    "launch.threads_per_rank=1",
    "data=synthetic",
    "data.num_sequences=64",
    "data.seq_len=16",
    "model=mlp",
    "model.hidden_size=32",
    "train.max_steps=3",
    "train.micro_batch_size=2",
    "train.eval_batches=1",
    "train.sample_tokens=0",
)
"""A run of a second, apart from starting Python."""
TWO_RANKS = "launch.nproc_per_node=2"
PATIENT = f"launch.timeout_s={10 * HANG_S}"
"""A rank that waits in a collective for one that is gone would hang."""
MISBEHAVING = (*TINY, "model._target_=misbehaving.MisbehavingMLP", "hydra.run.dir=run", PATIENT)
SHOWN_BY_HAND = "python launch.py zero.stage=3 launch.nproc_per_node=2"
SHOWN_SWEEP = "torchrun --nproc-per-node 2 launch.py -m zero.stage=2,3"
"""Commands of the README that test_launching.py runs as they stand there, but for TINY."""


@dataclass
class Command:
    """A command under way in `folder`. It and all it starts carry a mark in their environment, so that none hides."""

    arguments: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    start: Callable[..., subprocess.Popen[bytes] | Forked] = subprocess.Popen
    """Or `Zygote.start`, where it is not about a start."""

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.output_path, self.error_path = self.folder / f"{self.mark}.out", self.folder / f"{self.mark}.err"
        search = os.pathsep.join([str(REPOSITORY), str(USER_CODE)])
        with self.output_path.open("w") as out, self.error_path.open("w") as err, _heeding_ctrl_c():
            self.process = self.start(
                self.arguments,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.mark},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        finally:
            for process in self.processes():
                # What a failing test leaves behind must not disturb the next.
                if self.process.poll() is None:
                    process.kill()

    def require_failed(self, cause: str) -> None:
        """Make sure that it fails with a cause, on stderr first and in the result of `run`, and leaves no process."""
        assert self.wait() == 1, self.stderr
        assert self.stderr.startswith(cause), self.stderr
        result = result_of(self.folder / "run")
        assert result["status"] == "failed", result["error"]
        assert result["error"].startswith(cause)
        assert self.wait_until_gone() == []

    @property
    def stdout(self) -> str:
        return self.output_path.read_text()

    @property
    def stderr(self) -> str:
        return self.error_path.read_text()

    def send_signal_as_terminal(self, signum: int) -> None:
        """As Ctrl-C does: to the whole process group."""
        os.killpg(self.process.pid, signum)

    def stop_at_once(self, signum: int) -> None:
        """As one who presses Ctrl-C and, since the running step does not end, again."""
        self.send_signal_as_terminal(signum)
        time.sleep(1.2)  # so soon as a second it would be the same request
        self.send_signal_as_terminal(signum)

    def pid_of_rank(self, run_dir: Path, rank: int) -> int:
        """The process of a rank, once it has written its state: the file is there a moment before its text."""
        path = run_dir / f"ranks/{rank}.state"
        self.wait_for_text(path, "}")
        return int(json.loads(path.read_text()[16:])["pid"])

    def kill(self) -> None:
        """As `kill -9` does: to the first process alone."""
        self.process.send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """The processes of this command that are alive, those included whose parent is gone."""
        return [process for process in psutil.process_iter() if _is_alive_with_mark(process, self.mark)]

    def wait_until_gone(self, timeout_s: float = HANG_S) -> list[psutil.Process]:
        """The processes that are left after at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def wait_for_text(self, path: Path, text: str, timeout_s: float = HANG_S) -> None:
        """Wait until a file that the command writes holds `text`."""
        deadline = time.monotonic() + timeout_s
        while not (path.exists() and text in path.read_text()):
            assert self.process.poll() is None, f"ended early: {self.stderr}"
            assert time.monotonic() < deadline, f"{text!r} never came to {path.name}: {self.stdout}{self.stderr}"
            time.sleep(0.02)


def by_hand(*arguments: str, folder: Path, zygote: Zygote | None = None, **environment: str) -> Command:
    """`python launch.py ...`, forked from the zygote where one is given."""
    return Command([sys.executable, str(REPOSITORY / "launch.py"), *arguments], folder, environment, _start_of(zygote))


ON_TWO_RANKS = (*["--standalone"] * (torch.__version__ < "2.13"), "--nproc-per-node=2")
"""By itself torchrun takes any free port since torch 2.13."""


def by_torchrun(
    *arguments: str, folder: Path, options: tuple[str, ...] = ON_TWO_RANKS, zygote: Zygote | None = None
) -> Command:
    """`torchrun ... launch.py ...`; it and its ranks are forked from the zygote where one is given."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = {} if zygote is None else zygote.for_torchrun
    return Command([*torchrun, str(REPOSITORY / "launch.py"), *arguments], folder, environment, _start_of(zygote))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def result_of(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


@contextmanager
def _heeding_ctrl_c() -> Iterator[None]:
    """Processes started in here end at SIGINT, as those of a terminal do. Where a shell has started pytest in the
    background it ignores SIGINT, and so would they."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_of(zygote: Zygote | None) -> Callable[..., subprocess.Popen[bytes] | Forked]:
    return subprocess.Popen if zygote is None else zygote.start


def _is_alive_with_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone since it was listed, or another user's
        return False
