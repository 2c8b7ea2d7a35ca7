"""Starting `launch.py` as a fork of a process that has imported torch: two seconds of CPU less for each.

The code is the real one from its first line, in processes of their own; only the imports are there already.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos import places
from tests.chaos.strike import FOLDER_VARIABLE
from tests.ranks.processes import HANG_S
from tests.zygote import server as zygote

_CHILDREN_COME_HERE = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): processes whose parent was killed become children of this one."""


def get_ready() -> None:
    """Of a process that calls `start`: what is left behind comes to it."""
    import ctypes

    zygote.get_ready()
    ctypes.CDLL(None).prctl(_CHILDREN_COME_HERE, 1)


def start(arguments: list[str], folder: Path, *, out: Path) -> int:
    """Run a command in a folder in which kills are planned; its exit code, -9 where it was killed.

    Raises:
        AssertionError: it hangs, or leaves a process behind.
    """
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "PYTHONPATH": str(zygote.REPOSITORY),
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
    process = os.fork()
    if process == 0:
        try:
            os.environ[FOLDER_VARIABLE] = str(folder)
            os.environ.pop("RANK", None)
            places.arm()
            zygote.become(request)
        finally:
            os._exit(1)
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
