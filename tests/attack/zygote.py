"""Runs `launch.py`, or another command of ours, again and again in children of one process that has imported torch:
0.3 s each in place of 3 s.

The code is the real one from its first line; only the imports are there already. Reads a JSON object a line,
{"arguments", "folder", "environment", "out", "timeout_s"}, and answers each with the exit code. It has
"module" too, of another command than launch.py or null, and "stdout", a file, `CLOSED_PIPE` or null. A program that a
child of another command started or became is a line `started: ...` of its output to stderr.
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
import zerotrain.launching.command.task
import zerotrain.models  # noqa: F401

CLOSED_PIPE = "a pipe that nobody reads"
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
        stdout = request.get("stdout") or f"{request['out']}.out"
        for descriptor, name in enumerate(["/dev/null", stdout, f"{request['out']}.err"]):
            opened = closed_pipe() if name == CLOSED_PIPE else os.open(name, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        module = request.get("module")
        sys.argv = [module or str(REPOSITORY / "launch.py"), *request["arguments"]]
        sys.path[0] = str(REPOSITORY)
        if module is None:
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            if request.get("tell_programs"):
                sys.addaudithook(tell_of_programs)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell_of_programs(event: str, arguments: tuple) -> None:
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        print(f"started: {event} {arguments!r}"[:500], file=sys.stderr)


def closed_pipe() -> int:
    """The end of a pipe to write into, of which the other end is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


if __name__ == "__main__":
    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()  # looks through all installed packages once
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)
