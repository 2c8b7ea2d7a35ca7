"""The training loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader

from zerotrain.comm.world import World
from zerotrain.data.batches import IGNORED_LABEL, GlobalBatchSampler
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.errors import printable
from zerotrain.training.evaluation import evaluate
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
from zerotrain.training.stop import interrupt_on_sigterm

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True)
class Trainer:
    """Trains an engine's model on a dataset, and says on rank 0 what came of it.

    The field names are those of the `train` settings. Every rank makes one and calls `run`.
    """

    engine: ZeroEngine
    """Around a model with forward(ids, labels) -> mean loss and forward(ids) -> logits."""
    world: World
    dataset: Any
    """Map-style datasets `train` and `validation` of (ids, labels); see `zerotrain.data`."""
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
        self.sampler = GlobalBatchSampler(
            num_sequences=len(self.dataset.train),
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.gradient_accumulation_steps,
            rank=self.world.rank,
            num_ranks=self.world.size,
            seed=self.seed,
            leaves_per_rank=len(self.engine.virtual_ranks),
        )
        self.sampler.next_step = self.first_step
        self.result = RunResult(
            world_size=self.world.size, steps=self.first_step, skipped_steps=self.skipped_before, **self.run_facts
        )
        self.clock = StepClock()
        self._warned = False
        if self.world.rank > 0:
            self.console, self.sinks = Console(quiet=True), ()

    def run(self) -> dict[str, Any]:
        """Train, evaluate, show a sample and the report; return the body of result.json. Collective.

        result.json is written however the run ends, as long as this process can.
        """
        with interrupt_on_sigterm() as stop:
            try:
                self._show_start()
                self._train()
                show_sample(
                    self.console,
                    engine=self.engine,
                    dataset=self.dataset,
                    num_tokens=self.sample_tokens,
                    seed=self.seed,
                )
                usages = self._measure()
                self.result.status = "completed"
            except BaseException as error:
                stopped = stop.received or isinstance(error, KeyboardInterrupt)
                self.result.status = "stopped" if stopped else "failed"
                self.result.error = printable(f"{type(error).__name__}: {error}")
                raise
            finally:
                self.result.tokens_per_s = self.clock.tokens_per_s()
                self.result.step_ms_median = self.clock.step_ms_median()
                self.result.mfu = self._utilization()
                if self.world.rank == 0:
                    self.result.write(self.run_dir)
        print_report(self.console, result=self.result, usages=usages, device=self.world.device)
        return self.result.body()

    def _show_start(self) -> None:
        if self.world.rank == 0:
            print_start(
                self.console,
                engine=self.engine,
                dataset=self.dataset,
                sampler=self.sampler,
                plan_name=f"stage {self.result.stage}",
                num_steps=self.max_steps - self.first_step,
            )

    def _train(self) -> None:
        with ExitStack() as stack:
            metrics_file = self._metrics_file()
            progress = ProgressDisplay(console=self.console, max_steps=self.max_steps, first_step=self.first_step)
            sinks = [*metrics_file, progress, *self.sinks]
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
            batches = self._micro_batches()
            for step in range(self.first_step, self.max_steps):
                self.begin(step + 1)
                self._set_learning_rate(step - self.result.skipped_steps)
                with self.clock:
                    micro_batches, num_labels = next(batches)
                    weights, num_tokens = self._loss_weights(num_labels)
                    seed_each = partial(seed_leaf, self.seed, step)
                    outcome = self.engine.train_step(micro_batches, weights=weights, before_each=seed_each)
                # Read only now: the step has waited for the device anyway.
                self.clock.count(float(num_tokens))
                self.result.skipped_steps += outcome.skipped
                self.result.steps = step + 1
                step_done()
                progress.advance()
                if self._is_due(self.log_every) or step == self.first_step:
                    log(self._measure_step(outcome))
                if self._is_due(self.eval_every):
                    log(self._evaluate())

    def _metrics_file(self) -> list[MetricSink]:
        """metrics.jsonl on rank 0. A run that goes on leaves in it what its first steps wrote."""
        if self.world.rank > 0:
            return []
        return [MetricsFile(self.run_dir / "metrics.jsonl", append=self.first_step > 0)]

    def _is_due(self, every: int) -> bool:
        """Whether something to be done every so many steps comes now; 0: only after the last."""
        return self.result.steps == self.max_steps or (every > 0 and self.result.steps % every == 0)

    def _micro_batches(self) -> Iterator[tuple[list[MicroBatch], list[int]]]:
        """This rank's micro-batches of each step, on its device; and the labels that count in each, unless all
        sequences have the same number: counted where the labels are made, so that no device is waited for."""
        device = self.world.device
        loader = DataLoader(self.dataset.train, batch_sampler=self.sampler, pin_memory=device.type == "cuda")
        counts = self._tokens_per_sequence is None
        for rows in loader:
            labels = rows[1].split(self.micro_batch_size)
            num_labels = [int((each != IGNORED_LABEL).sum()) for each in labels] if counts else []
            ids, labels = (part.to(device, non_blocking=True).split(self.micro_batch_size) for part in rows)
            yield list(zip(ids, labels, strict=True)), num_labels

    def _set_learning_rate(self, num_updates: int) -> None:
        factor = self.schedule(num_updates, self.max_steps)
        for group in self.engine.param_groups:
            group["lr"] = group["initial_lr"] * factor

    @property
    def _tokens_per_sequence(self) -> int | None:
        """Labels that count in each sequence, where all have the same number."""
        return getattr(self.dataset.train, "tokens_per_sequence", None)

    def _loss_weights(self, num_labels: list[int]) -> tuple[list[float | torch.Tensor] | None, float | torch.Tensor]:
        """The weight of each micro-batch's mean loss in the mean over all tokens, and the number of those tokens.

        The engine takes the mean over virtual ranks, so a micro-batch with n of the global batch's tokens weighs
        n * num_virtual_ranks / total. Where all sequences have the same number of tokens that is 1 / len, the engine's
        default; else the ranks must add up their counts. That is not done needlessly: the sum would wait behind the
        parameters still being gathered after the last step, which the engine hides behind the forward.

        A micro-batch without any label weighs 0, and says so as a number: the engine then lets nothing of it through,
        also where its loss is nan.
        """
        if self._tokens_per_sequence is not None:
            return None, float(self.sampler.global_batch_size * self._tokens_per_sequence)
        mine = torch.tensor(sum(num_labels), dtype=torch.float64).to(self.world.device, non_blocking=True)
        total = self.world.sum(mine)
        per_label = total.clamp(min=1)
        size = self.sampler.num_virtual_ranks
        return [(num * size / per_label).float() if num else 0.0 for num in num_labels], total

    def _measure_step(self, outcome: TrainStepResult) -> dict[str, Any]:
        """What a step of training came to, for the sinks. Collective."""
        loss = self.world.sum(outcome.loss.double()).item() / self.world.size
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
        }

    def _utilization(self, last_steps: int | None = None) -> float | None:
        """MFU over the last so many steps, or over the run without its first steps."""
        if self.model_flops is None:
            return None
        return self.model_flops.utilization(self.sampler.global_batch_size * self.clock.steps_per_s(last_steps))

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
        self.result.final_val_loss = evaluate(
            engine=self.engine,
            world=self.world,
            dataset=self.dataset.validation,
            num_sequences=self.eval_batches * self.sampler.global_batch_size,
            micro_batch_size=self.micro_batch_size,
        )
        if math.isnan(self.result.final_val_loss) and not self._warned:
            self._warned = True
            self.console.print(
                "warning: the validation loss is nan: no label of the validation counts, or the model's loss is nan",
                highlight=False,
            )
        return {"val_loss": self.result.final_val_loss}

    def _measure(self) -> list[RankUsage]:
        """Fill in what is known at the end only; return the usage of all ranks. Collective."""
        usage = measure_usage(
            engine=self.engine,
            device=self.world.device,
            num_micro_batches=self.gradient_accumulation_steps * len(self.engine.virtual_ranks),
        )
        self.result.weights_sha256 = self.engine.weights_sha256()
        self.result.comm_bytes_per_step = {"sent": usage.sent_nbytes, "theory": usage.theory_sent_nbytes}
        self.result.memory_bytes = self.engine.memory_bytes() | {"peak": usage.peak_nbytes}
        return gather_usages(usage, self.world)
