"""Starting `launch.py` and its ranks as forks of a process that has imported torch: seconds of CPU less for each.

The code is the real one from its first line, in processes of their own; only the imports are there already. With
`plain` nothing is: the commands are those of a user, and site/sitecustomize.py arms them.
"""

import atexit
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

import zerotrain.launching.start.worker  # noqa: F401 what a rank imports
from tests.chaos import places
from tests.chaos.strike import FOLDER_VARIABLE
from tests.zygote import server as zygote
from zerotrain.testing.limits import HANG_S

SITE = Path(__file__).parent / "site"
_CHILDREN_COME_HERE = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): processes whose parent was killed become children of this one."""


def get_ready() -> None:
    """Of a process that calls `start`: what is left behind comes to it."""
    import ctypes

    zygote.get_ready()
    ctypes.CDLL(None).prctl(_CHILDREN_COME_HERE, 1)
    inspect.stack()  # as torch's rendezvous does 18 times a start: it notes the file of each module once


def start(arguments: list[str], folder: Path, *, out: Path, plain: bool) -> int:
    """Run a command in a folder in which kills are planned; its exit code, -9 where it was killed.

    Raises:
        AssertionError: it hangs, or leaves a process behind.
    """
    search = [str(SITE)] if plain else []
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "PYTHONPATH": os.pathsep.join([*search, str(zygote.REPOSITORY)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder / "tmp"),
        FOLDER_VARIABLE: str(folder),
    }
    request = {
        "arguments": [str(zygote.REPOSITORY / "launch.py"), *arguments],
        "folder": str(folder),
        "environment": environment,
        "stdout": f"{out}.out",
        "stderr": f"{out}.err",
        "tells_programs": False,
    }
    process = _plain(request) if plain else _forked(request)
    code = _ending(process)
    left = _left_after(0.0 if code is None else HANG_S)
    for each in left:
        with suppress(psutil.Error):
            each.kill()
    _left_after(HANG_S)
    if code is None:
        raise AssertionError(f"hangs: {HANG_S:g} s")
    if left:
        raise AssertionError(f"left behind: {len(left)} processes")
    return code


def _plain(request: dict[str, Any]) -> int:
    with open(request["stdout"], "w") as out, open(request["stderr"], "w") as err:
        command = [sys.executable, *request["arguments"]]
        # Waited for by `_ending`.
        return subprocess.Popen(
            command, cwd=request["folder"], env=request["environment"], stdout=out, stderr=err, start_new_session=True
        ).pid


def _forked(request: dict[str, Any]) -> int:
    process = os.fork()
    if process == 0:
        try:
            os.environ[FOLDER_VARIABLE] = request["environment"][FOLDER_VARIABLE]
            os.environ.pop("RANK", None)
            SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign]
            places.arm()
            zygote.become(request)
        finally:
            os._exit(1)
    return process


def _ending(process: int) -> int | None:
    """The exit code; None if it does not end."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def _left_after(limit_s: float) -> list[psutil.Process]:
    """What is there of this process's children at last, and theirs."""
    deadline = time.monotonic() + limit_s
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def _fork_rank(_: SubprocessHandler, arguments: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen:
    return _ForkedRank(arguments, env=environment)


class _ForkedRank(subprocess.Popen):
    """What torch's agent has of a rank, which is a fork of the agent in place of a new Python."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: dict[str, str],
        *_: Any,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(list(args), env)
        self._child_created = True


def _become_rank(arguments: list[str], environment: dict[str, str]) -> None:
    """Turn this fork of the agent into `python -m MODULE ...`, and end."""
    code = 1
    try:
        _forget_parent()
        os.environ.clear()
        os.environ.update(environment)
        module = arguments.index("-m") + 1
        sys.argv = arguments[module:]
        places.arm()
        runpy.run_module(arguments[module], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_parent() -> None:
    """What a new program would not have of the process that started it."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # or the end of this one removed its folders
    # The lock of the run's folder is one. Not closed: the number would be another file's, and then closed with the old.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (int(each) for each in os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with suppress(OSError):
                os.dup2(nothing, descriptor)
