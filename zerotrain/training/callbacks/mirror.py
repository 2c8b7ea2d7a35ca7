"""Copies the checkpoints of a run to its mirror beside the training."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, newest_first
from zerotrain.checkpoint.mirror import Mirror
from zerotrain.errors import CheckpointError
from zerotrain.training.callback import Callback, Run
from zerotrain.training.report import say

LONGEST_PAUSE_S = 60.0
"""Between two tries at a mirror that cannot be reached. The first pause is a second, each other twice the last."""
LAST_TRIES_S = 30.0
"""So long a run that ends goes on trying, behind the copy that is under way."""


@dataclass(eq=False)
class RunMirror(Callback):
    """The mirror of a run, fed by a thread of rank 0. If several checkpoints wait, it copies the newest. A run that
    fails does not wait for it.

    Args:
        keep: as many of the newest stay there; None: all.
    """

    ranks = "first"
    mirror: Mirror
    keep: int | None
    _waiting: Path | None = None
    """The checkpoint to copy next."""
    _failures: int = 0
    _reason: str | None = None
    """The problem of the last try without the checkpoint's name: it is said once, not for each checkpoint."""
    _deadline_s: float | None = None
    """The end of the tries, once the run has ended."""
    _thread: threading.Thread | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, run: Run) -> None:
        """Copy what an earlier start has saved and not copied."""
        run.result.mirror = {"url": self.mirror.url, "newest": None, "failures": 0, "problem": None}
        self._thread = threading.Thread(target=self._copy_all, args=[run], name="mirror-checkpoints", daemon=True)
        self._thread.start()
        for path in newest_first(run.folder / CHECKPOINTS)[:1]:
            self.after_save(run, path)

    def after_save(self, run: Run, path: Path) -> None:
        """See `Callback.after_save`."""
        with self._changed:
            self._waiting = path
            self._changed.notify()

    def end(self, run: Run) -> None:
        """Wait for the newest copy, or until the mirror has failed for a while."""
        with self._changed:
            self._deadline_s = time.monotonic() + LAST_TRIES_S
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _copy_all(self, run: Run) -> None:
        while (path := self._next()) is not None:
            try:
                self.mirror.push(path)
                self.mirror.remove_old(self.keep)
                problem = None
            except CheckpointError as error:
                problem = str(error)
                self._failures += 1
            facts: dict[str, Any] = {"failures": self._failures, "problem": problem}
            if problem is None:
                facts["newest"] = path.name
                with self._changed:
                    self._waiting = None if self._waiting == path else self._waiting
            run.result.mirror = (run.result.mirror or {}) | facts
            reason = None if problem is None else problem.replace(path.name, "")
            if reason is not None and reason != self._reason:
                say(run.console, f"warning: {problem}; the run goes on, and tries again")
            elif reason is None and self._reason is not None:
                say(run.console, f"{path.name} is at {self.mirror.url} now")
            self._reason = reason

    def _next(self) -> Path | None:
        """The next checkpoint to copy, after a pause if the last try has failed; None at the end of the run."""
        num_tries, begun_s = 0 if self._reason is None else min(self._failures, 10), time.monotonic()
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (num_tries - 1)) if num_tries else 0.0
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._deadline_s is not None and (self._waiting is None or now_s > self._deadline_s):
                    return None
                left_s = begun_s + min(pause_s, 1.0 if self._deadline_s is not None else pause_s) - now_s
                if self._waiting is not None and left_s <= 0:
                    return self._waiting
                self._changed.wait(left_s if self._waiting is not None else None)
