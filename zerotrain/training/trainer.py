"""The training loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.data.fetch import Collate
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.errors import printable
from zerotrain.training.evaluation import evaluate_sources
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.flops import ModelFlops
from zerotrain.training.metrics import StepClock
from zerotrain.training.profile import recorded_steps
from zerotrain.training.progress import ProgressDisplay
from zerotrain.training.report import RankUsage, gather_usages, measure_usage, print_report
from zerotrain.training.result import RunResult
from zerotrain.training.sample import show_sample
from zerotrain.training.seeds import seed_leaf
from zerotrain.training.sinks import MetricsFile, MetricSink
from zerotrain.training.start import print_start
from zerotrain.training.stop import name_of_stop, stop_requests

ROWS_PER_EVAL_BATCH = 8
"""What `eval_batches` counts. A number, not the batch of training: what is validated must not depend on ranks."""
DATA_WAIT_SHOWN = 0.05
"""Share of the steps' time that a run may wait for its data without a word."""


@dataclass(kw_only=True)
class Trainer:
    """Trains an engine's model on a dataset, and says on rank 0 what came of it.

    The field names are those of the `train` settings. Every rank makes one and calls `run`.
    """

    engine: ZeroEngine
    """Around a model with forward(ids, labels) -> mean loss and forward(ids) -> logits."""
    world: World
    dataset: Any
    """Map-style datasets `train` and `validation` of what the model takes; see `zerotrain.data`."""
    schedule: Callable[[int, int], float]
    """(updates done, max_steps) -> factor on the learning rate. A skipped step is no update."""
    seed: int
    """Of the order of the data and of the sample of text."""
    max_steps: int
    """Global batches to train on, those of skipped steps and of steps before `first_step` included."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_every: int
    eval_batches: int
    log_every: int
    sample_tokens: int
    run_dir: Path
    """Exists; rank 0 writes metrics.jsonl and result.json there."""
    run_facts: dict[str, Any]
    """What result.json repeats of the settings: {stage, overrides, config_hash}."""
    profile: bool = False
    memory_snapshot: bool = False
    model_flops: ModelFlops | None = None
    """For MFU; None where it is not known."""
    console: Console = field(default_factory=Console)
    """Where rank 0 shows its progress."""
    sinks: Sequence[MetricSink] = ()
    """Where rank 0 sends metrics beside metrics.jsonl and the console; `run` closes them."""
    begin: Callable[[int], None] = lambda step: None
    """Told the number of each step, from 1, as it begins."""
    num_workers: int = 0
    """Processes that read the training data ahead."""
    collate_fn: Collate | None = None
    """Makes a batch of items; None: torch's default_collate."""
    data_checked: Mapping[str, Any] | None = None
    """What the data was when it was checked, by `zerotrain.data.fingerprint`; None where nobody did."""
    data_state: Mapping[str, Any] | None = None
    """Where in the data the run is: {rows_consumed, seed, order_version, fingerprint}. As it is given, the run goes on
    there, with whatever ranks and batch size; None: behind `first_step` batches of this size. From the first step on
    it is where the run is, after each step the position behind it."""
    first_step: int = 0
    """Global batches that the engine was trained on before; metrics.jsonl is gone on with where it is there."""
    skipped_before: int = 0
    """Those of them that were skipped, which are no updates to the schedule."""

    def __post_init__(self) -> None:
        if not 0 <= self.skipped_before <= self.first_step < self.max_steps:
            raise ValueError(
                f"first_step={self.first_step} must be in 0..{self.max_steps - 1}, below max_steps, and "
                f"skipped_before={self.skipped_before} in 0..first_step"
            )
        self.feed = TrainingFeed(
            self.dataset,
            engine=self.engine,
            world=self.world,
            seed=self.seed,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.gradient_accumulation_steps,
            first_step=self.first_step,
            num_workers=self.num_workers,
            collate=self.collate_fn,
        )
        self.result = RunResult(
            world_size=self.world.size, steps=self.first_step, skipped_steps=self.skipped_before, **self.run_facts
        )
        self.clock = StepClock()
        self._warned = False
        if self.world.rank > 0:
            self.console, self.sinks = Console(quiet=True), ()

    def run(self) -> dict[str, Any]:
        """Train, evaluate, show a sample and the report; return the body of result.json. Collective.

        result.json is written however the run ends, as long as this process can; after a signal to stop in order.
        """
        with stop_requests(partial(setattr, self.engine, "signal")) as stop:
            try:
                self.feed.agree(self.data_state, self.data_checked)
                self.data_state = self.feed.sampler.state_dict()
                self._show_start()
                usages = self._finish() if self._train() else None
            except BaseException as error:
                stopped = stop.at_once or isinstance(error, KeyboardInterrupt)
                self.result.status = "stopped" if stopped else "failed"
                self.result.error = printable(f"{type(error).__name__}: {error}")
                raise
            finally:
                self.result.tokens_per_s = self.clock.tokens_per_s()
                self.result.step_ms_median = self.clock.step_ms_median()
                self.result.mfu = self._utilization()
                self.result.data_wait_ms = self.clock.data_wait_ms()
                if self.world.rank == 0:
                    self.result.write(self.run_dir)
        if usages is not None:
            print_report(self.console, result=self.result, usages=usages, device=self.world.device)
        if (share := self.clock.data_wait_share()) > DATA_WAIT_SHOWN:
            said = f"waited for data {share:.0%} of the time: {self.feed.advice_on_waiting()}"
            self.console.print(said, highlight=False, markup=False)
        return self.result.body()

    def _show_start(self) -> None:
        if self.world.rank == 0:
            print_start(
                self.console,
                engine=self.engine,
                dataset=self.dataset,
                sampler=self.feed.sampler,
                plan_name=f"stage {self.result.stage}",
                num_steps=self.max_steps - self.first_step,
            )

    def _train(self) -> bool:
        """Whether all steps are done; not so after a signal to stop."""
        with ExitStack() as stack:
            progress = ProgressDisplay(console=self.console, max_steps=self.max_steps, first_step=self.first_step)
            sinks = [*self._metrics_file(), progress, *self.sinks]
            for sink in sinks:
                stack.callback(sink.close)
            step_done = stack.enter_context(self._recorded_steps())

            def log(metrics: dict[str, Any]) -> None:
                for sink in sinks:
                    sink.log(metrics, self.result.steps)

            # A model that `from_pretrained` has made is in evaluation mode, in which dropout does nothing.
            self.engine.train()
            if self.eval_every and self.first_step == 0:
                log(self._evaluate())
            loader = stack.enter_context(self.feed.loader(self.max_steps - self.first_step))
            for step in range(self.first_step, self.max_steps):
                self.begin(step + 1)
                self._set_learning_rate(step - self.result.skipped_steps)
                with self.clock:
                    micro_batches, weights, num_tokens = self.feed.next_step(loader)
                    seed_each = partial(seed_leaf, self.seed, step)
                    outcome = self.engine.train_step(micro_batches, weights=weights, before_each=seed_each)
                # Read only now: the step has waited for the device anyway.
                self.clock.count(float(num_tokens), loader.wait_s)
                self.feed.step_done()
                self.data_state = self.feed.sampler.state_dict()
                self.result.skipped_steps += outcome.skipped
                self.result.steps = step + 1
                step_done()
                progress.advance()
                stopped_by = name_of_stop(outcome.signals) if self.result.steps < self.max_steps else None
                if stopped_by or self._is_due(self.log_every) or step == self.first_step:
                    log(self._measure_step(outcome))
                if stopped_by:  # on all ranks alike: here the run saves what it has come to
                    self.result.stop(stopped_by, self.max_steps)
                    return False
                if self._is_due(self.eval_every):
                    log(self._evaluate())
        return True

    def leaf(self, virtual_rank: int) -> dict[str, torch.Tensor]:
        """What a virtual rank will add to the gradient of the next step: `engine.leaf`. At stage 3 collective."""
        micro_batches, weights = self.feed.leaf(virtual_rank)
        seed_each = partial(seed_leaf, self.seed, self.result.steps)
        return self.engine.train().leaf(virtual_rank, micro_batches, weights=weights, before_each=seed_each)

    def _metrics_file(self) -> list[MetricSink]:
        """metrics.jsonl on rank 0. A run that goes on leaves in it what its first steps wrote."""
        path = self.run_dir / "metrics.jsonl"
        return [] if self.world.rank > 0 else [MetricsFile(path, append=self.first_step > 0)]

    def _is_due(self, every: int) -> bool:
        """Whether something to be done every so many steps comes now; 0: only after the last."""
        return self.result.steps == self.max_steps or (every > 0 and self.result.steps % every == 0)

    def _set_learning_rate(self, num_updates: int) -> None:
        factor = self.schedule(num_updates, self.max_steps)
        for group in self.engine.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _measure_step(self, outcome: TrainStepResult) -> dict[str, Any]:
        """What a step of training came to, for the sinks. Collective."""
        loss, wait_ms = self._over_ranks(outcome.loss)
        self.result.final_train_loss = loss
        return {
            "train_loss": loss,
            "lr": self.engine.param_groups[0]["lr"],
            "grad_norm": outcome.grad_norm,
            "grad_norm_clipped": outcome.grad_norm * outcome.clip_coefficient,
            "skipped_steps": self.result.skipped_steps,
            "loss_scale": outcome.loss_scale,
            "tokens_per_s": self.clock.tokens_per_s(last_steps=self.log_every),
            "step_ms_median": self.clock.step_ms_median(last_steps=self.log_every),
            "mfu": self._utilization(last_steps=self.log_every),
            "data_wait_ms": wait_ms,
            "epoch": self.feed.epoch,
            "tokens": self.feed.num_tokens,
        }

    def _over_ranks(self, loss: torch.Tensor) -> tuple[float, float]:
        """(mean loss, milliseconds that the last steps waited for their data on the rank that waited longest)."""
        waits = loss.new_zeros(self.world.size, dtype=torch.float64)
        waits[self.world.rank] = self.clock.data_wait_ms(last_steps=self.log_every)
        total, *waits_ms = self.world.sum(torch.cat([loss.double().view(1), waits])).tolist()
        return total / self.world.size, max(waits_ms)

    def _utilization(self, last_steps: int | None = None) -> float | None:
        """MFU over the last so many steps, or over the run without its first steps."""
        if self.model_flops is None:
            return None
        return self.model_flops.utilization(self.feed.sampler.global_batch_size * self.clock.steps_per_s(last_steps))

    def _recorded_steps(self) -> AbstractContextManager[Callable[[], None]]:
        if self.memory_snapshot and self.world.device.type != "cuda":
            self.console.print("warning: train.memory_snapshot=true has no effect on the CPU", highlight=False)
        return recorded_steps(
            self.run_dir / "profile",
            rank=self.world.rank,
            device=self.world.device,
            max_steps=self.max_steps - self.first_step,
            trace=self.profile,
            memory=self.memory_snapshot,
        )

    def _evaluate(self) -> dict[str, Any]:
        loss, by_source = evaluate_sources(
            engine=self.engine,
            world=self.world,
            dataset=self.dataset.validation,
            num_sequences=self.eval_batches * ROWS_PER_EVAL_BATCH,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            step=self.result.steps,
            collate=self.collate_fn,
        )
        self.result.final_val_loss, self.result.val_loss_by_source = loss, by_source or None
        if math.isnan(loss) and not self._warned:
            self._warned = True
            self.console.print(
                "warning: the validation loss is nan: no label of the validation counts, or the model's loss is nan",
                highlight=False,
            )
        return {"val_loss": loss} | {f"val_loss/{name}": value for name, value in by_source.items()}

    def _finish(self) -> list[RankUsage]:
        """Show a sample, fill in what is known at the end only; return the usage of all ranks. Collective."""
        show_sample(
            self.console, engine=self.engine, dataset=self.dataset, num_tokens=self.sample_tokens, seed=self.seed
        )
        usage = measure_usage(
            engine=self.engine,
            device=self.world.device,
            num_micro_batches=self.gradient_accumulation_steps * len(self.engine.virtual_ranks),
        )
        self.result.weights_sha256 = self.engine.weights_sha256()
        self.result.comm_bytes_per_step = {"sent": usage.sent_nbytes, "theory": usage.theory_sent_nbytes}
        self.result.memory_bytes = self.engine.memory_bytes() | {"peak": usage.peak_nbytes}
        self.result.status = "completed"
        return gather_usages(usage, self.world)
