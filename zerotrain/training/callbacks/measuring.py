"""A run's measurements: each step, its speed so far, and at its end the bytes of each rank."""

import time
from typing import Any

import torch

from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.clock import ModelFlops, StepClock
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.metrics.metric import TrainingMetrics
from zerotrain.training.report import RankUsage, print_report, say
from zerotrain.training.result import RunResult

DATA_WAIT_SHOWN = 0.05
"""Share of the steps' time that a run may wait for its data without a word."""


class Measuring(Callback):
    """Logs steps, and fills in the result of a run. The speed of a step is taken over `log_every` steps."""

    def __init__(
        self,
        engine: ZeroEngine,
        world: World,
        feed: TrainingFeed,
        result: RunResult,
        clock: StepClock,
        stages: RunStages,
        metrics: TrainingMetrics,
        *,
        model_flops: ModelFlops | None,
        log_every: int,
    ) -> None:
        self._engine, self._world, self._feed, self._result = engine, world, feed, result
        self._clock, self._stages, self._metrics = clock, stages, metrics
        self._model_flops, self._log_every = model_flops, log_every
        self._usages: list[RankUsage] = []
        """Usage of all ranks at the end."""

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.is_due(self._log_every) or run.step == 1:
            run.log(self._step_metrics(outcome))

    def end(self, run: Run) -> None:
        """Note the speed and, after the last step, what is known then only: the weights, and what the ranks hold."""
        if not run.stopped_by:
            self._usages = self._stages.note_usage()
            usage = self._usages[self._world.rank]
            self._result.weights_sha256 = self._engine.weights_sha256()
            self._result.comm_bytes_per_step = {"sent": usage.sent_nbytes, "theory": usage.theory_sent_nbytes}
            planned = self._result.memory_bytes or {}
            most = {"peak": usage.peak_nbytes, "reserved": usage.reserved_nbytes}
            self._result.memory_bytes = self._engine.memory_bytes() | most | planned
        self._note_speed()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self._note_speed()

    def completed(self, run: Run) -> None:
        """Print what came of the run."""
        print_report(run.console, result=self._result, usages=self._usages, device=self._world.device)
        if (share := self._clock.data_wait_share()) > DATA_WAIT_SHOWN:
            say(run.console, f"waited for data {share:.0%} of the time: {self._feed.advice_on_waiting()}")

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"clock": self._clock.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._clock.load_state_dict(state["clock"])

    def _step_metrics(self, outcome: TrainStepResult) -> dict[str, Any]:
        """The metrics of one training step, for the sinks. Collective."""
        waits = outcome.loss.new_zeros(self._world.size, dtype=torch.float64)
        waits[self._world.rank] = self._clock.data_wait_ms(last_steps=self._log_every)
        total_loss, *waits_ms = self._world.sum(torch.cat([outcome.loss.double().view(1), waits])).tolist()
        self._result.final_train_loss = loss = total_loss / self._world.size
        return {
            "train_loss": loss,
            **self._metrics.take(),
            **self._rates(),
            "grad_norm": outcome.grad_norm,
            "grad_norm_clipped": outcome.grad_norm * outcome.clip_coefficient,
            "skipped_steps": self._result.skipped_steps,
            "loss_scale": outcome.loss_scale,
            **self._speeds(self._log_every),
            "step_ms_median": self._clock.step_ms_median(last_steps=self._log_every),
            "mfu": self._utilization(last_steps=self._log_every),
            "data_wait_ms": max(waits_ms),  # of the rank that waited longest
            **self._parts_ms(self._log_every),
            "epoch": self._feed.epoch,
            "samples": self._feed.num_samples,
            "tokens": self._feed.num_tokens,
            "sent_nbytes": self._engine.ledger.last_step.sent_nbytes,
            "peak_nbytes": device_of(self._world.device).peak_nbytes(),
            "train_s": self._clock.train_s,
            "wall_time_s": time.time(),
        }

    def _speeds(self, last_steps: int | None = None) -> dict[str, float | None]:
        """Tokens, labels that count in the loss and samples per second; None for tokens where the data has none."""
        per_step = self._feed.sampler.global_batch_size
        return {
            "tokens_per_s": self._clock.tokens_per_s(last_steps) if self._feed.reads_tokens else None,
            "labels_per_s": self._clock.labels_per_s(last_steps),
            "samples_per_s": per_step * self._clock.steps_per_s(last_steps),
        }

    def _parts_ms(self, last_steps: int | None = None) -> dict[str, float | None]:
        """Milliseconds of this rank's step that are no compute; None where the host does not wait for its device."""
        waits = device_of(self._world.device).is_host
        return {
            "comm_wait_ms": self._clock.comm_wait_ms(last_steps) if waits else None,
            "update_ms": self._clock.update_ms(last_steps) if waits else None,
        }

    def _rates(self) -> dict[str, float]:
        """The learning rate, and those of groups with one of their own."""
        main, *further_groups = self._engine.param_groups
        rates = {"lr": main["lr"]}
        for group in further_groups:
            if (group["lr"], group["initial_lr"]) != (main["lr"], main["initial_lr"]):
                rates[f"lr/{group['name']}"] = group["lr"]
        return rates

    def _note_speed(self) -> None:
        """The speed of the run, however it has ended."""
        for name, value in (self._speeds() | self._parts_ms()).items():
            setattr(self._result, name, value)
        self._result.step_ms_median = self._clock.step_ms_median()
        self._result.mfu = self._utilization()
        self._result.data_wait_ms = self._clock.data_wait_ms()
        self._result.train_s = self._clock.train_s

    def _utilization(self, last_steps: int | None = None) -> float | None:
        """MFU over the last so many steps, or over the run without its first steps."""
        if self._model_flops is None:
            return None
        per_step = self._feed.sampler.global_batch_size
        return self._model_flops.utilization(per_step * self._clock.steps_per_s(last_steps))
