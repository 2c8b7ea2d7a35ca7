"""A run of pytest in a tree of its own, as a child of this process.

It has imported what others have made and nothing of ours: a child imports zerotrain as it lies in its tree, from the
first line, and need not wait for torch.
"""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

OF_OTHERS = ("hydra.core.plugins", "peft", "psutil", "pytest", "rich.progress", "torch._dynamo")
"""What takes long to import. None of them makes a thread, which a fork would lose."""
OURS = ("zerotrain", "tests")
PLANTED_S = 100.0
"""Until a planted fault counts as one that hangs: its tests take seconds, and the table shows which faults hang."""


@dataclass(frozen=True)
class Ending:
    """What came of a run."""

    code: int | None
    """The exit code of pytest; None if it hung."""
    failed: str
    """The first test that failed, or the end of the output."""
    took_s: float


def run_tests(tests: list[str], tree: Path, limit_s: float = PLANTED_S, *, keeps_bytecode: bool = False) -> Ending:
    """Run tests of a tree up to the first that fails.

    Args:
        tests: within tests/: files, or "file::test".
    """
    for name in OF_OTHERS:
        import_module(name)
    started_s, ended, status = time.monotonic(), 0, 0
    process = os.fork()
    if process == 0:
        _become_pytest(tests, tree, keeps_bytecode)
    while not ended and time.monotonic() - started_s < limit_s:
        time.sleep(0.02)
        ended, status = os.waitpid(process, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # ranks that still wait for each other
    if not ended:
        os.waitpid(process, 0)
    output = tree.with_suffix(".out").read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(\[.*)?( - .*)?$", output, re.MULTILINE)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return Ending(code, found[1] if found else output[-2000:], time.monotonic() - started_s)


def _become_pytest(tests: list[str], tree: Path, keeps_bytecode: bool) -> NoReturn:
    code = -1
    try:
        os.setsid()
        out = os.open(tree.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]  # these files
        sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
        if not keeps_bytecode:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        options = ["-x", "--slow", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    finally:
        sys.stdout.flush()
        os._exit(code)
