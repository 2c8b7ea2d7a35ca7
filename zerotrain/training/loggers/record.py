"""steps.jsonl: what each step came to, exactly, for a replay to compare; and where each of them was computed.

    {"step": 0, "start": {"torch": "2.13.0", "device": "CPU", "settings": {...}, "data": {...}, ...}}
    {"step": 1, "loss": 5.545177459716797, "grad_norm": 1.2532202, "update": "05777dc9972591a3", "skipped": false}

A file beside metrics.jsonl, whose lines have their own rhythm and go to every tracker. All numbers of a line came with
the exchange of the norm: a step has no further message, and the device is not waited for.
"""

import platform
import shlex
from typing import Any

import torch

from zerotrain.checkpoint.manifest import versions
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.device.kinds import device_of
from zerotrain.engine.results import TrainStepResult
from zerotrain.errors import TrainingError
from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.report import say
from zerotrain.training.figures.sinks import STEPS_NAME, MetricsFile
from zerotrain.training.figures.spikes import NUM_BEFORE, Spikes


class StepRecord(Callback):
    """Writes steps.jsonl, on rank 0, and tells a step that stands out as it comes.

    Args:
        sampler: of the run's training, whose fingerprint tells the data.
    """

    ranks = "first"

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler
        self._file: MetricsFile | None = None
        self._spikes = Spikes()
        self._silent_until = 0
        """A step that stands out before this one is not told: a line says enough of a curve that stays where it is."""

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._file = MetricsFile(run.folder / STEPS_NAME, append=run.step > 0)
        told = environment(run.world.device) | {"ranks": run.world.size, "data": dict(self._sampler.fingerprint or {})}
        self._file.log({"start": told | {"settings": run.settings}}, run.step)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if self._file is not None:
            line = recorded(outcome)
            self._file.log(line, run.step)
            spike = self._spikes.of(line)
            if spike is not None and run.step >= self._silent_until:
                self._silent_until = run.step + NUM_BEFORE
                say(run.console, f"step {run.step}: {spike}; which rows: {replay_command(run, run.step)}")

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if self._file is not None:
            self._file.close()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`. Says the command that explains a step whose numbers have ended the run."""
        self.end(run)
        if isinstance(error, TrainingError):
            say(run.console, f"which rows and module: {replay_command(run, run.step + 1)}")


def replay_command(run: Run, step: int) -> str:
    """The command that computes a step of a run again."""
    return f"python -m zerotrain replay {shlex.quote(str(run.folder))} --step {step}"


def recorded(outcome: TrainStepResult) -> dict[str, Any]:
    """The numbers of a step that are compared, in as many digits as they have."""
    return {
        "loss": outcome.mean_loss,
        "grad_norm": outcome.grad_norm,
        "update": outcome.update_hash,
        "skipped": outcome.skipped,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """All that the bits of a step depend on beside its settings and data."""
    return versions() | {
        "device": device_of(device).name.partition(",")[0],
        "machine": platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
