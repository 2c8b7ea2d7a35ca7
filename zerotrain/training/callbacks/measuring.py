"""A run's measurements: each step, its speed so far, and at its end the bytes of each rank."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.record import environment
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.clock import ModelFlops, StepClock
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.metrics.metric import TrainingMetrics
from zerotrain.training.report import print_report, say

DATA_WAIT_SHOWN = 0.05
"""Share of the steps' time spent waiting for data; above it a run says so."""


@dataclass(eq=False)
class Measuring(Callback):
    """Logs steps, and fills in the result of a run. The speed of a step is taken over `log_every` steps."""

    clock: StepClock
    feed: TrainingFeed
    stages: RunStages
    metrics: TrainingMetrics
    model_flops: ModelFlops | None
    log_every: int
    usages: list[dict[str, int]] = field(default_factory=list)
    """The usage of all ranks at the end."""

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.is_due(self.log_every) or run.step == 1:
            run.result.final_train_loss = outcome.mean_loss
            run.log(self._step_metrics(run, outcome))

    def end(self, run: Run) -> None:
        """Note the speed and, after the last step, what is known then only: the weights, and what the ranks hold."""
        graphs = {"replayed": run.engine.num_replayed, "reasons": run.engine.graph_reasons}
        precision = run.engine.options.config.precision
        facts = {"graphs": graphs, "matmul": precision.matmul, "state": precision.state}
        run.result.environment = environment(run.world.device) | facts
        if not run.stopped_by:
            self.usages = self.stages.note_usage(run)
            usage = self.usages[run.world.rank]
            run.result.weights_sha256 = run.engine.weights_sha256()
            sent = {"sent": usage["sent_nbytes"], "theory": usage["theory_sent_nbytes"]}
            if usage["across_nbytes"]:
                sent |= {"across": usage["across_nbytes"], "theory_across": usage["theory_across_nbytes"]}
            run.result.comm_bytes_per_step = sent
            planned = run.result.memory_bytes or {}
            most = {"peak": usage["peak_nbytes"], "reserved": usage["reserved_nbytes"]}
            run.result.memory_bytes = run.engine.memory_bytes() | most | planned
        self._note_speed(run)

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self._note_speed(run)

    def completed(self, run: Run) -> None:
        """Print what came of the run."""
        print_report(run.console, result=run.result, usages=self.usages, device=run.world.device)
        if (share := self.clock.figures()["data_wait_share"]) > DATA_WAIT_SHOWN:
            say(run.console, f"waited for data {share:.0%} of the time: {self.feed.advice_on_waiting()}")

    def _step_metrics(self, run: Run, outcome: TrainStepResult) -> dict[str, Any]:
        """The metrics of one training step, for the sinks. Collective."""
        speed = self._speed(run, self.log_every)
        wait_ms = torch.tensor([speed["data_wait_ms"]], dtype=torch.float64, device=run.world.device)
        waits_ms = run.engine.collectives.gather_small(wait_ms, name="waits for data")
        return {
            "train_loss": outcome.mean_loss,
            **self.metrics.take(),
            **rates_of(run.engine),
            "grad_norm": outcome.grad_norm,
            "grad_norm_clipped": outcome.grad_norm * outcome.clip_coefficient,
            "skipped_steps": run.result.skipped_steps,
            "loss_scale": outcome.loss_scale,
            **speed,
            "data_wait_ms": waits_ms.max().item(),  # of the rank that waited longest
            **self.feed.position(),
            "sent_nbytes": run.engine.ledger.last_step.sent_nbytes,
            "peak_nbytes": device_of(run.world.device).peak_nbytes(),
            "train_s": self.clock.train_s,
            "wall_time_s": time.time(),
        }

    def _note_speed(self, run: Run) -> None:
        """The speed of the run, however it has ended."""
        for name, value in self._speed(run).items():
            setattr(run.result, name, value)
        run.result.train_s = self.clock.train_s

    def _speed(self, run: Run, last_steps: int | None = None) -> dict[str, Any]:
        """The speed over the last so many steps, or over the run without its first steps, by the names of result.json.
        None is what the data has not, and the time of a host that does not wait for its device."""
        figures, is_host = self.clock.figures(last_steps), device_of(run.world.device).is_host
        samples_per_s = self.feed.sampler.global_batch_size * figures["steps_per_s"]
        return {
            "tokens_per_s": figures["tokens_per_s"] if self.feed.reads_tokens else None,
            "labels_per_s": figures["labels_per_s"],
            "samples_per_s": samples_per_s,
            "step_ms_median": figures["step_ms_median"],
            "mfu": None if self.model_flops is None else self.model_flops.utilization(samples_per_s),
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
