"""The training loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zerotrain.comm.ranks.world import World
from zerotrain.data.reading.fetch import Collate
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import ConfigError, TrainingError
from zerotrain.files.printable import printable
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy, Resumed, RunCheckpoints
from zerotrain.training.callbacks.control import CONTROL_NAME, Control, stage_asked
from zerotrain.training.callbacks.evaluation import RunEvaluation
from zerotrain.training.callbacks.profile import recorded_steps
from zerotrain.training.callbacks.progress import ProgressDisplay
from zerotrain.training.callbacks.sample import show_sample
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.callbacks.stop import StopRequest, name_of_stop, stop_requests
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.figures.flops import ModelFlops
from zerotrain.training.figures.report import RankUsage
from zerotrain.training.figures.result import RunResult
from zerotrain.training.figures.sinks import (
    METRICS_NAME,
    MetricsFile,
    MetricSink,
    keep_lines,
    log_to,
    restore_states,
    states_of,
)
from zerotrain.training.measuring import Measuring
from zerotrain.training.sameness.seeds import seed_leaf
from zerotrain.training.schedule import set_rates
from zerotrain.training.start import print_start


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
    stages: Mapping[int, int] = field(default_factory=dict)
    """Steps done, and the ZeRO stage from there on: {500: 3}. Before the first entry the engine's own."""
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
    """Where rank 0 sends metrics beside metrics.jsonl and the console; `run` closes them. See `ResumableSink`."""
    begin: Callable[[int], None] = lambda step: None
    """Told the number of each step, from 1, as it begins."""
    num_workers: int = 0
    """Processes that read the training data ahead."""
    collate_fn: Collate | None = None
    """Makes a batch of items; None: torch's default_collate."""
    data_checked: Mapping[str, Any] | None = None
    """What the data was when it was checked, by `zerotrain.data.reading.fingerprint`; None where nobody did."""
    data_state: Mapping[str, Any] | None = None
    """Where in the data the run is: {rows_consumed, seed, order_version, fingerprint}. As it is given, the run goes on
    there, with whatever ranks and batch size; None: behind `first_step` batches of this size. From the first step on
    it is where the run is, after each step the position behind it."""
    first_step: int = 0
    """Global batches that the engine was trained on before; metrics.jsonl is gone on with where it is there."""
    skipped_before: int = 0
    """Those of them that were skipped, which are no updates to the schedule."""
    checkpoint: CheckpointPolicy | None = None
    """When to save, and what to go on from; None: neither."""
    settings: Mapping[str, Any] | None = None
    """What checkpoints note of the run's settings: nested dicts of what JSON can hold."""

    def __post_init__(self) -> None:
        if not 0 <= self.skipped_before <= self.first_step <= self.max_steps:
            raise ValueError(
                f"first_step={self.first_step} must be in 0..{self.max_steps}, which is max_steps, and "
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
        if self.world.rank > 0:
            self.console, self.sinks = Console(quiet=True), ()
        self.measuring = Measuring(
            self.engine, self.world, self.feed, self.result, model_flops=self.model_flops, log_every=self.log_every
        )
        self.evaluation = RunEvaluation(
            self.console,
            num_batches=self.eval_batches,
            engine=self.engine,
            world=self.world,
            dataset=self.dataset.validation,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            collate=self.collate_fn,
        )
        self.run_stages = RunStages(
            self.engine, self.world, self.result, self.console, self.stages, self.gradient_accumulation_steps
        )
        self.checkpoints = RunCheckpoints(
            self.engine, self.world, self.run_dir, policy=self.checkpoint, console=self.console, settings=self.settings
        )
        self.control = Control(self.run_dir / CONTROL_NAME, self.world, self.console)
        self._evaluated_at: int | None = self.first_step or None

    def run(self) -> dict[str, Any]:
        """Train, evaluate, show a sample and the report; return the body of result.json. Collective.

        result.json is written however the run ends, as long as this process can. A run that is told to stop ends after
        a step, and saves what it has trained.

        Raises:
            CheckpointError: no checkpoint to go on from can be taken up; or, after all else, a save has failed.
        """
        with stop_requests(partial(setattr, self.engine, "signal")) as stop:
            try:
                if (resumed := self.checkpoints.resume()) is not None:
                    self._go_on(resumed)
                plan_name = self.run_stages.begin(self.first_step)
                self.feed.agree(self.data_state, self.data_checked)
                if resumed is not None and self.world.rank == 0:
                    self._take_over(resumed)
                self.data_state = self.feed.sampler.state_dict()
                if self.world.rank == 0:
                    print_start(
                        self.console,
                        engine=self.engine,
                        dataset=self.dataset,
                        sampler=self.feed.sampler,
                        plan_name=plan_name,
                        num_steps=self.max_steps - self.first_step,
                    )
                stopped_by = self._train(stop)
                usages = None if stopped_by else self._end()
                failure = self.checkpoints.finish()
                self.result.end(stopped_by, self.max_steps, failure)
            except BaseException as error:
                if isinstance(error, TrainingError):  # of all ranks alike
                    self.checkpoints.finish()
                is_stop = stop.at_once or isinstance(error, KeyboardInterrupt)
                self.result.status = "stopped" if is_stop else "failed"
                self.result.error = printable(f"{type(error).__name__}: {error}")
                raise
            finally:
                self.measuring.of_speed()
                self.checkpoints.note_in(self.result)
                if self.world.rank == 0:
                    self.result.write(self.run_dir)
        if usages is not None:
            self.measuring.report(self.console, usages)
        if failure is not None:
            raise failure
        return self.result.body()

    def _go_on(self, resumed: Resumed) -> None:
        """Be where the run was that has saved a checkpoint."""
        if resumed.step > self.max_steps:
            problem = f"train.max_steps: got {self.max_steps}, but {resumed.path} is of step {resumed.step}"
            raise ConfigError(f"{problem}; it must be as many or more")
        state = resumed.state
        self.first_step, self.skipped_before = resumed.step, state["skipped_steps"]
        self.data_state, self._evaluated_at = state["data"], state["evaluated_at"]
        self.result.load_state_dict(state["result"])
        self.result.steps, self.result.resumed_from = self.first_step, str(resumed.path)
        self.feed.first_step = self.first_step
        self.measuring.clock.load_state_dict(state["clock"])
        restore_states(self.sinks, state["sinks"])
        self.run_stages.asked = state["asked_stages"]

    def _take_over(self, resumed: Resumed) -> None:
        """Have in the run's folder what belongs to the steps before, once nothing can be refused any more."""
        self.checkpoints.agreed(resumed)
        keep_lines(resumed.path.parent.parent / METRICS_NAME, self.run_dir / METRICS_NAME, until=self.first_step)

    def _state(self) -> dict[str, Any]:
        """Where the run is, for a checkpoint: what `_go_on` reads."""
        return {
            "data": dict(self.data_state or {}),
            "skipped_steps": self.result.skipped_steps,
            "evaluated_at": self._evaluated_at,
            "result": self.result.state_dict(),
            "clock": self.measuring.clock.state_dict(),
            "sinks": states_of(self.sinks),
            "asked_stages": self.run_stages.asked,
            "run": {**self.run_facts, "run_dir": str(self.run_dir)},
        }

    def _train(self, stop: StopRequest) -> str | None:
        """Train to the last step, or to a stop: then the name of the signal. Collective."""
        with ExitStack() as stack:
            path, goes_on = self.run_dir / METRICS_NAME, self.first_step > 0
            metrics_file: list[MetricSink] = [MetricsFile(path, append=goes_on)] if self.world.rank == 0 else []
            progress = ProgressDisplay(console=self.console, max_steps=self.max_steps, first_step=self.first_step)
            sinks = [*metrics_file, progress, *self.sinks]
            for sink in sinks:
                stack.callback(sink.close)
            recording = recorded_steps(
                self.run_dir / "profile",
                self.world,
                max_steps=self.max_steps - self.first_step,
                trace=self.profile,
                memory=self.memory_snapshot,
                console=self.console,
            )
            step_done = stack.enter_context(recording)
            log = partial(log_to, sinks, self.result)

            # A model that `from_pretrained` has made is in evaluation mode, in which dropout does nothing.
            self.engine.train()
            if self._owes_evaluation():
                log(self._evaluate())
            loader = stack.enter_context(self.feed.loader(self.max_steps - self.first_step))
            for step in range(self.first_step, self.max_steps):
                self.begin(step + 1)
                set_rates(self.engine.param_groups, self.schedule(step - self.result.skipped_steps, self.max_steps))
                with self.measuring.clock:
                    micro_batches, weights, num_tokens = self.feed.next_step(loader)
                    seed_each = partial(seed_leaf, self.seed, step)
                    self.engine.signal = stop.signum | self.checkpoints.ask() | self.control.ask()
                    outcome = self.engine.train_step(micro_batches, weights=weights, before_each=seed_each)
                # Read only now: the step has waited for the device anyway.
                self.measuring.clock.count(float(num_tokens), loader.wait_s)
                self.feed.step_done()
                self.data_state = self.feed.sampler.state_dict()
                self.result.skipped_steps += outcome.skipped
                self.result.steps = step + 1
                step_done()
                progress.advance()
                self.checkpoints.look(self.measuring.clock.last_s)
                stopped_by = name_of_stop(outcome.signals) if self.result.steps < self.max_steps else None
                if self._is_due(self.log_every) or step == 0:
                    log(self.measuring.of_step(outcome))
                if step + 1 < self.max_steps:
                    self.run_stages.go_on(step + 1, log, stage_asked(outcome.signals))
                if self._is_due(self.eval_every) and not stopped_by:
                    log(self._evaluate())
                if self.checkpoints.is_due(step + 1, outcome.signals) or stopped_by:
                    self.checkpoints.save(step + 1, self._state(), wait=bool(stopped_by))
                self.control.answer(step + 1)
                if stopped_by:
                    return stopped_by
            return None

    def _end(self) -> list[RankUsage]:
        """Save, show a sample of text, and measure what is known at the end only. Collective."""
        self.checkpoints.save_at_end(self.result.steps, self._state())
        show_sample(self.console, self.engine, self.dataset, num_tokens=self.sample_tokens, seed=self.seed)
        return self.measuring.of_ranks(self.run_stages.end())

    def _owes_evaluation(self) -> bool:
        """Whether one is due before the next step: the first of all, or one that a stop came before."""
        if self.first_step == 0:
            return self.eval_every > 0
        return self._is_due(self.eval_every) and self._evaluated_at != self.first_step

    def leaf(self, virtual_rank: int) -> dict[str, torch.Tensor]:
        """What a virtual rank will add to the gradient of the next step: `engine.leaf`. At stage 3 collective."""
        micro_batches, weights = self.feed.leaf(virtual_rank)
        seed_each = partial(seed_leaf, self.seed, self.result.steps)
        return self.engine.train().leaf(virtual_rank, micro_batches, weights=weights, before_each=seed_each)

    def _is_due(self, every: int) -> bool:
        """Whether something to be done every so many steps comes now; 0: only after the last."""
        return self.result.steps == self.max_steps or (every > 0 and self.result.steps % every == 0)

    def _evaluate(self) -> dict[str, Any]:
        loss, by_source = self.evaluation.after(self.result.steps)
        self.result.final_val_loss, self.result.val_loss_by_source = loss, by_source or None
        self._evaluated_at = self.result.steps
        return {"val_loss": loss} | {f"val_loss/{name}": value for name, value in by_source.items()}
