"""A disk that takes its time, and calls to the system of which one fails or is the last."""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.ranks.processes import HANG_S


class SlowDisk:
    """Stands before `os.write` to the files of ranks.

    Args:
        pause_s: before each write; None: a rank's writes wait until `let_go` of it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float | None = None) -> None:
        self._let_go: dict[int, threading.Event] = defaultdict(threading.Event)
        real = os.write

        def write(descriptor: int, data: Any) -> int:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
            if name.startswith("rank-"):
                if pause_s is None:
                    assert self._let_go[int(name[5:10])].wait(HANG_S)
                else:
                    time.sleep(pause_s)
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)

    def let_go(self, rank: int) -> None:
        """From now on this rank's writes pass."""
        self._let_go[rank].set()


def interrupt(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], at: int, act: Callable[[], object]) -> list[str]:
    """Do something else at call number `at` of these to the system; returns the calls, as they are made."""
    calls: list[str] = []

    def wrapped(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == at:
                act()
            return real(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))
    return calls


def fail(code: int) -> None:
    raise OSError(code, os.strerror(code))


def killed_in(call: Callable[[pytest.MonkeyPatch], object]) -> bool:
    """Whether a child that makes this call is killed in it."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as monkeypatch:
            call(monkeypatch)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
