"""A disk that takes its time: what ranks write to their files is held, or slowed, and then goes to the real disk."""

import os
import threading
import time
from collections import defaultdict
from typing import Any

import pytest

from zerotrain.testing.ranks import HANG_S


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
