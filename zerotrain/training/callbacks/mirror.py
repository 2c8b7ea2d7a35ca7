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
STALLED_S = 120.0
"""A copy under way at the end of a run is left there once no block of it was taken for so long."""


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
    _facts: dict[str, Any] = field(default_factory=dict)
    """Those of `RunResult.mirror`."""
    _reason: str | None = None
    """The problem of the last try without the checkpoint's name: it is said once, not for each checkpoint."""
    _deadline_s: float | None = None
    """The end of the tries, once the run has ended."""
    _thread: threading.Thread = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, run: Run) -> None:
        """Copy what an earlier start has saved and not copied."""
        self._facts = {"url": self.mirror.url, "newest": None, "failures": 0, "problem": None}
        run.result.mirror = self._facts
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
        """Wait for the newest copy, or until the mirror has failed or taken nothing for a while."""
        ended_s = time.monotonic()
        with self._changed:
            self._deadline_s = ended_s + LAST_TRIES_S
            self._changed.notify()
        left_s = STALLED_S
        while self._thread.is_alive() and left_s > 0:
            self._thread.join(left_s)
            left_s = max(ended_s, self.mirror.moved_s) + STALLED_S - time.monotonic()
        if self._thread.is_alive():
            problem = f"{self.mirror.url} has taken nothing for {STALLED_S:g} s"
            self._facts |= {"failures": self._facts["failures"] + 1, "problem": problem}
            say(run.console, f"warning: {problem}; the run ends without its last copy")

    def _copy_all(self, run: Run) -> None:
        while (path := self._next()) is not None:
            try:
                self.mirror.push(path)
                self.mirror.remove_old(self.keep)
            except CheckpointError as error:
                self._facts |= {"failures": self._facts["failures"] + 1, "problem": str(error)}
                reason = str(error).replace(path.name, "")
                if reason != self._reason:
                    say(run.console, f"warning: {error}; the run goes on, and tries again")
                self._reason = reason
                continue
            self._facts |= {"newest": path.name, "problem": None}
            if self._reason is not None:
                say(run.console, f"{path.name} is at {self.mirror.url} now")
            self._reason = None
            with self._changed:
                self._waiting = None if self._waiting == path else self._waiting

    def _next(self) -> Path | None:
        """The next checkpoint to copy, after a pause if the last try has failed; None at the end of the run."""
        num_tries, begun_s = 0 if self._reason is None else min(self._facts["failures"], 10), time.monotonic()
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
