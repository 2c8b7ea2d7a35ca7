"""Runs `launch.py` again and again in children of one process that has imported torch: 0.3 s each in place of 3 s.

The code is the real one from its first line; only the imports are there already. Reads a JSON object a line,
{"arguments", "folder", "environment", "out", "timeout_s"}, and answers each with the exit code.
"""

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

# What launch.py imports on its way to the ranks. Nothing here makes a thread, which a fork would lose.
import hydra.core.plugins
import torch
import torch.optim

import zerotrain.data
import zerotrain.launching.task
import zerotrain.models  # noqa: F401

REPOSITORY = Path(__file__).resolve().parents[2]


def run(request: dict) -> int:
    """The exit code of one command; -9 where it took too long."""
    pid = os.fork()
    if pid == 0:
        become(request)
    deadline = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become(request: dict) -> None:
    """Turn this child into the command, and end."""
    os.setsid()
    code = 1
    try:
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for descriptor, name in enumerate(["/dev/null", f"{request['out']}.out", f"{request['out']}.err"]):
            opened = os.open(name, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        sys.argv = [str(REPOSITORY / "launch.py"), *request["arguments"]]
        sys.path[0] = str(REPOSITORY)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()  # looks through all installed packages once
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)
