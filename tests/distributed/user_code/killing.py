"""Kills a rank as a machine might."""

import os
import signal

from zerotrain.training import Callback


class Killing(Callback):
    """Kills rank 0 after each of these steps, the first time that the run comes there."""

    ranks = "first"

    def __init__(self, *, steps: list[int]) -> None:
        self.steps = steps

    def after_step(self, run, outcome):
        mark = run.folder / f"killed-{run.step}"
        if run.step in self.steps and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
