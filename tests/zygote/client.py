"""Programs that are forked from the process of `server.py`, which has imported what they import."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.ranks.processes import HANG_S
from tests.zygote.server import MARK, NO_MARK, REPOSITORY

POLL_S = 0.01
SOCKET = "socket"
STAND_INS = "ZEROTRAIN_TEST_SERVER"
"""A variable that names the socket to stand-ins."""


@dataclass(frozen=True)
class Ending:
    """What came of a command."""

    code: int
    out: str
    err: str


class Forked:
    """A program under way, as `subprocess.Popen` has it."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = HANG_S) -> int:
        """The exit code; what hangs is ended with all that it has started in its session."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                deadline += HANG_S
            time.sleep(POLL_S)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Server:
    """The process of `server.py`."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        """
        Args:
            folder: for its socket, and for the caches of its programs.
            prefix: what to put before its command, which runs it elsewhere.
        """
        self.folder = folder
        stand_in = f"#!{sys.executable} -IS\n{Path(__file__).with_name('stand_in.py').read_text()}"
        (folder / "python").write_text(stand_in)
        (folder / "python").chmod(0o755)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("server.py")), str(folder / SOCKET)],
            env={**environment_of(folder), MARK: NO_MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of programs that a server forks."""
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/distributed/user_code")]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # a thread of it would be lost by a fork
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **stand_in_variables(folder),
    }


def stand_in_variables(folder: Path) -> dict[str, str]:
    """Variables that let torchrun fork its ranks from the server in this folder."""
    return {"PYTHON_EXEC": str(folder / "python"), STAND_INS: str(folder / SOCKET)}


class Zygote:
    """A connection to the process of `server.py`, whose children the programs are."""

    def __init__(self, server: Path, folder: Path) -> None:
        """
        Args:
            server: the folder of a `Server` that is ready.
            folder: for what the programs print.
        """
        self._folder = folder
        self.environment = environment_of(server)
        self.for_torchrun = stand_in_variables(server)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server / SOCKET))
        self._socket.sendall(b" ")
        self._answers = self._socket.makefile("r")

    def ask(self, request: dict[str, Any]) -> Any:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(self._answers.readline())

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: TextIO | str,
        stderr: TextIO | str,
        start_new_session: bool = True,
        tells_programs: bool = False,
    ) -> Forked:
        """`subprocess.Popen` of this Python, with a file or `-m module` behind it.

        Args:
            stdout: the file that gets what it prints, or CLOSED_PIPE of `server`.
            tells_programs: add a line `started: ...` to its errors for each program that it starts.
        """
        assert command[0] == sys.executable
        assert start_new_session
        out, err = (each if isinstance(each, str) else each.name for each in (stdout, stderr))
        request = {"arguments": list(command[1:]), "folder": str(cwd), "environment": dict(env)}
        return Forked(self, self.ask({**request, "stdout": out, "stderr": err, "tells_programs": tells_programs}))

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        module: str | None = None,
        **how: Any,
    ) -> Ending:
        """Run `python launch.py` with these arguments, or `python -m module`, to its end; more as for `run_python`."""
        program = [str(REPOSITORY / "launch.py")] if module is None else ["-m", module]
        return self.run_python([*program, *arguments], folder, environment, **how)

    def run_python(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        stdout: str | None = None,
        tells_programs: bool = False,
    ) -> Ending:
        """Run `python ARGUMENTS` to its end; stdout and tells_programs as for `start`."""
        printed = self._folder / uuid.uuid4().hex
        forked = self.start(
            [sys.executable, *arguments],
            cwd=folder,
            env={**self.environment, **(environment or {})},
            stdout=stdout or f"{printed}.out",
            stderr=f"{printed}.err",
            tells_programs=tells_programs,
        )
        code = forked.wait()
        out = "" if stdout else Path(f"{printed}.out").read_text(errors="replace")
        return Ending(code, out, Path(f"{printed}.err").read_text(errors="replace"))

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
