"""steps.jsonl: what each step came to, exactly, for a replay to compare; and where each of them was computed.

    {"step": 0, "start": {"torch": "2.13.0", "device": "CPU", "settings": {...}, "data": {...}, ...}}
    {"step": 1, "loss": 5.545177459716797, "grad_norm": 1.2532202, "update": "05777dc9972591a3", "skipped": false}

A file beside metrics.jsonl, whose lines have their own rhythm and go to every tracker. All numbers of a line came with
the exchange of the norm: a step has no further message, and the device is not waited for.
"""

import platform
import shlex
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from zerotrain.checkpoint.manifest import versions
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.device.kinds import device_of
from zerotrain.engine.results import TrainStepResult
from zerotrain.errors import TrainingError
from zerotrain.training.callback import Callback, Run
from zerotrain.training.report import say
from zerotrain.training.result import STEPS_NAME, MetricsFile

# Spikes: a loss or a gradient far above those of the steps before.


NUM_BEFORE = 100
"""The steps to compare one with."""
MIN_BEFORE = 20
"""Fewer steps say too little of how far a number varies by itself."""
MIN_SCORE = 10.0
"""Standard deviations of a spike above the median, at least."""
MIN_SPREAD = 0.01
"""The least standard deviation, as a part of the median: what hardly varies is no spike for rising by a tenth."""
_QUARTILES_OF_A_NORMAL = 1.349
"""Standard deviations from the lower to the upper quartile."""


@dataclass(frozen=True)
class Spike:
    """A number of a step far above those before."""

    name: str
    value: float
    median: float
    """The median of the same number over the steps before it."""
    score: float
    """Standard deviations, told from the quartiles of the steps before it, by which it is above their median."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} stands out from the steps before it (median {self.median:.4g})"


def score_of(value: float, before: Collection[float]) -> tuple[float, float]:
    """How far a value is above the median of those before it, in standard deviations, and the median; 0 of fewer than
    `MIN_BEFORE`. Quartiles are not moved by an outlier."""
    count, values = len(before), sorted(before)
    if count < MIN_BEFORE:
        return 0.0, value
    median = values[count // 2]
    spread = max((values[count * 3 // 4] - values[count // 4]) / _QUARTILES_OF_A_NORMAL, MIN_SPREAD * abs(median))
    return ((value - median) / spread if spread else 0.0), median


class Spikes:
    """Looks for them, step after step."""

    def __init__(self) -> None:
        self._histories = {name: deque[float](maxlen=NUM_BEFORE) for name in ("loss", "grad_norm")}

    def find_in(self, line: Mapping[str, Any]) -> Spike | None:
        """The spike of the next step, the larger of two. Numbers that are unknown or not finite are none: they have
        words of their own.

        Args:
            line: of steps.jsonl.
        """
        spikes = []
        for name, history in self._histories.items():
            value = line.get(name)
            if isinstance(value, int | float) and isfinite(value):
                score, median = score_of(value, history)
                history.append(value)
                if score >= MIN_SCORE:
                    spikes.append(Spike(name, float(value), median, score))
        return max(spikes, key=lambda spike: spike.score, default=None)


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
        facts = environment(run.world.device) | {"ranks": run.world.size, "data": dict(self._sampler.fingerprint or {})}
        facts["graphs"] = run.engine.options.config.graphs
        self._file.log({"start": facts | {"settings": run.settings}}, run.step)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if self._file is not None:
            line = recorded(outcome)
            self._file.log(line, run.step)
            spike = self._spikes.find_in(line)
            if spike is not None and run.step >= self._silent_until:
                self._silent_until = run.step + NUM_BEFORE
                say(run.console, f"step {run.step}: {spike}; which rows: {replay_command(run, run.step)}")

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if self._file is not None:
            self._file.close()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`. Says the command to explain the step, if its numbers have ended the run."""
        self.end(run)
        if isinstance(error, TrainingError):
            say(run.console, f"which rows and module: {replay_command(run, run.step + 1)}")


def replay_command(run: Run, step: int) -> str:
    """The command to compute a step of a run again."""
    return f"zerotrain replay {shlex.quote(str(run.folder))} --step {step}"


def recorded(outcome: TrainStepResult) -> dict[str, Any]:
    """The numbers of a step to compare, in as many digits as they have."""
    return {
        "loss": outcome.mean_loss,
        "grad_norm": outcome.grad_norm,
        "update": outcome.update_hash,
        "skipped": outcome.skipped,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The facts behind the bits of a step, beside its settings and data. Attention is that which torch takes for heads
    of 64 in bf16: another torch or cuDNN may take another, with other bits."""
    heads = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    chosen = torch._fused_sdp_choice(heads, heads, heads, None, 0.0, True)
    return versions() | {
        "attention": torch.nn.attention.SDPBackend(chosen).name.lower(),
        "cudnn": torch.backends.cudnn.version(),
        "device": device_of(device).name.partition(",")[0],
        "machine": platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
