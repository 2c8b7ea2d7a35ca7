"""A run's measurements: each step, its speed so far, and at its end the bytes of each rank."""

import time
from typing import Any

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.clock import ModelFlops, StepClock
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.metrics.metric import TrainingMetrics
from zerotrain.training.report import print_report, say

DATA_WAIT_SHOWN = 0.05
"""Share of the steps' time that a run may wait for its data without a word."""


class Measuring(Callback):
    """Logs steps, and fills in the result of a run. The speed of a step is taken over `log_every` steps."""

    def __init__(
        self,
        clock: StepClock,
        feed: TrainingFeed,
        stages: RunStages,
        metrics: TrainingMetrics,
        *,
        model_flops: ModelFlops | None,
        log_every: int,
    ) -> None:
        self._clock, self._feed, self._stages, self._metrics = clock, feed, stages, metrics
        self._model_flops, self._log_every = model_flops, log_every
        self._usages: list[dict[str, int]] = []
        """Usage of all ranks at the end."""

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.is_due(self._log_every) or run.step == 1:
            run.result.final_train_loss = outcome.mean_loss
            run.log(self._step_metrics(run, outcome))

    def end(self, run: Run) -> None:
        """Note the speed and, after the last step, what is known then only: the weights, and what the ranks hold."""
        if not run.stopped_by:
            self._usages = self._stages.note_usage(run)
            usage = self._usages[run.world.rank]
            run.result.weights_sha256 = run.engine.weights_sha256()
            run.result.comm_bytes_per_step = {"sent": usage["sent_nbytes"], "theory": usage["theory_sent_nbytes"]}
            planned = run.result.memory_bytes or {}
            most = {"peak": usage["peak_nbytes"], "reserved": usage["reserved_nbytes"]}
            run.result.memory_bytes = run.engine.memory_bytes() | most | planned
        self._note_speed(run)

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self._note_speed(run)

    def completed(self, run: Run) -> None:
        """Print what came of the run."""
        print_report(run.console, result=run.result, usages=self._usages, device=run.world.device)
        if (share := self._clock.figures()["data_wait_share"]) > DATA_WAIT_SHOWN:
            say(run.console, f"waited for data {share:.0%} of the time: {self._feed.advice_on_waiting()}")

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"clock": self._clock.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._clock.load_state_dict(state["clock"])

    def _step_metrics(self, run: Run, outcome: TrainStepResult) -> dict[str, Any]:
        """The metrics of one training step, for the sinks. Collective."""
        speed = self._speed(run, self._log_every)
        wait_ms = torch.tensor([speed["data_wait_ms"]], dtype=torch.float64, device=run.world.device)
        waits_ms = run.engine.collectives.gather_small(wait_ms, name="waits for data")
        return {
            "train_loss": outcome.mean_loss,
            **self._metrics.take(),
            **rates_of(run.engine),
            "grad_norm": outcome.grad_norm,
            "grad_norm_clipped": outcome.grad_norm * outcome.clip_coefficient,
            "skipped_steps": run.result.skipped_steps,
            "loss_scale": outcome.loss_scale,
            **speed,
            "data_wait_ms": waits_ms.max().item(),  # of the rank that waited longest
            **self._feed.position(),
            "sent_nbytes": run.engine.ledger.last_step.sent_nbytes,
            "peak_nbytes": device_of(run.world.device).peak_nbytes(),
            "train_s": self._clock.train_s,
            "wall_time_s": time.time(),
        }

    def _note_speed(self, run: Run) -> None:
        """The speed of the run, however it has ended."""
        for name, value in self._speed(run).items():
            setattr(run.result, name, value)
        run.result.train_s = self._clock.train_s

    def _speed(self, run: Run, last_steps: int | None = None) -> dict[str, Any]:
        """The speed over the last so many steps, or over the run without its first steps, by the names of result.json.
        None is what the data has not, and the time of a host that does not wait for its device."""
        figures, is_host = self._clock.figures(last_steps), device_of(run.world.device).is_host
        samples_per_s = self._feed.sampler.global_batch_size * figures["steps_per_s"]
        return {
            "tokens_per_s": figures["tokens_per_s"] if self._feed.reads_tokens else None,
            "labels_per_s": figures["labels_per_s"],
            "samples_per_s": samples_per_s,
            "step_ms_median": figures["step_ms_median"],
            "mfu": None if self._model_flops is None else self._model_flops.utilization(samples_per_s),
            "data_wait_ms": figures["data_wait_ms"],
            "comm_wait_ms": figures["comm_wait_ms"] if is_host else None,
            "update_ms": figures["update_ms"] if is_host else None,
        }


def rates_of(engine: ZeroEngine) -> dict[str, float]:
    """The learning rate, and those of groups with one of their own."""
    main, *further_groups = engine.param_groups
    rates = {"lr": main["lr"]}
    for group in further_groups:
        if (group["lr"], group["initial_lr"]) != (main["lr"], main["initial_lr"]):
            rates[f"lr/{group['name']}"] = group["lr"]
    return rates
