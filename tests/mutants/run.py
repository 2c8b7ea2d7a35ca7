"""A run of pytest in a tree of its own, as a child of this process.

It has imported what others have made and nothing of ours: a child imports zerotrain as it lies in its tree, from the
first line, and need not wait for torch.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
class Tests:
    """What is to run."""

    name: str
    of: list[str]
    """Within tests/: files, or "file::test"."""
    prepare: Callable[[Path], Callable[[], None]]
    """Gets the tree ready; what it returns makes it as it was."""
    keeps_bytecode: bool = False
    limit_s: float = PLANTED_S


@dataclass(frozen=True)
class Ending:
    """What came of it."""

    name: str
    code: int | None
    """The exit code of pytest; None if it hung."""
    failed: str
    """The first test that failed, or the end of the output."""
    took_s: float


class _Run:
    """One that is under way."""

    def __init__(self, tests: Tests, tree: Path) -> None:
        self._tests, self.tree, self._started_s = tests, tree, time.monotonic()
        self._undo = tests.prepare(tree)
        self._pid = os.fork()
        if self._pid == 0:
            _become_pytest(tests, tree)

    def ending(self) -> Ending | None:
        """None while it runs."""
        took_s = time.monotonic() - self._started_s
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        if not ended and took_s < self._tests.limit_s:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # ranks that still wait for each other
        if not ended:
            os.waitpid(self._pid, 0)
        self._undo()
        output = _output_of(self.tree).read_text(errors="replace")
        found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(\[.*)?( - .*)?$", output, re.MULTILINE)
        code = os.waitstatus_to_exitcode(status) if ended else None
        return Ending(self._tests.name, code, found[1] if found else output[-2000:], took_s)


def endings(all_tests: Iterable[Tests], trees: list[Path]) -> Iterator[Ending]:
    """Run the tests, each up to its first failure, and as many at once as there are trees; what came of each, as they
    end."""
    for name in OF_OTHERS:
        import_module(name)
    waiting, free, running = iter(all_tests), list(trees), list[_Run]()
    while True:
        while free and (tests := next(waiting, None)) is not None:
            running.append(_Run(tests, free.pop()))
        if not running:
            return
        for run in list(running):
            if (ending := run.ending()) is not None:
                running.remove(run)
                free.append(run.tree)
                yield ending
        time.sleep(0.02)


def _become_pytest(tests: Tests, tree: Path) -> NoReturn:
    code = -1
    try:
        os.setsid()
        out = os.open(_output_of(tree), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]  # these files
        sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
        if not tests.keeps_bytecode:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        options = ["-x", "--slow", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        code = pytest.main([*options, *(f"tests/{test}" for test in tests.of)])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _output_of(tree: Path) -> Path:
    return tree.with_suffix(".out")
