"""The training loop, and the callbacks of a run in their order."""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.data.fetch import AUTO, Collate, RowError, RowPlace, StopTimeoutError
from zerotrain.device.kinds import reading
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CommError, ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.training import clock, feed, report, result, sameness
from zerotrain.training.callback import Callback, CallbackList, Run
from zerotrain.training.callbacks import checkpoints, console, evaluation, loggers, measuring, profile, record, sample
from zerotrain.training.callbacks.stages import Control, RunFreezing, RunStages
from zerotrain.training.metrics.metric import OF_VALIDATION, TrainingMetrics, metrics_in, rising_metrics
from zerotrain.training.request import ASKED, Request, StopRequest, decoded, stop_requests
from zerotrain.training.schedule import set_rates

_ALL_UNREAD_S = 5.0
"""So long after one rank has given up its rows the others may."""


@dataclass(kw_only=True)
class Trainer:
    """Trains an engine's model on a dataset, and reports the result on rank 0.

    The field names are those of the `train` settings. Every rank makes one and calls `run`. Callbacks do the work
    beside the steps, see `zerotrain.training.trainer`.
    """

    engine: ZeroEngine
    """Around a model with forward(ids, labels) -> mean loss and forward(ids) -> logits."""
    world: World
    dataset: Any
    """Map-style datasets `train` and `validation` of what the model takes; see `zerotrain.data`."""
    validation_sets: Mapping[str, Any] = field(default_factory=dict)
    """Further data of the same kind, by name, evaluated beside the validation of `dataset`."""
    schedule: Callable[[int, int], float]
    """(updates done, max_steps) -> factor on the learning rate. A skipped step is no update."""
    stages: Mapping[int, int] = field(default_factory=dict)
    """Steps done, and the ZeRO stage from there on: {500: 3}. Before the first entry the engine's own."""
    frozen: Mapping[str, int | None] = field(default_factory=dict)
    """Parameters that the settings freeze, by first name: the steps for which they do not train; None: all."""
    seed: int
    """Seed of the data's order and of the sample of text."""
    max_steps: int
    """Global batches to train on, those of skipped steps and of steps before `first_step` included."""
    verify_every: int = 0
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_every: int
    eval_batches: int | str
    """Batches of `ROWS_PER_EVAL_BATCH` rows, or "all" rows."""
    log_every: int
    sample_tokens: int
    run_dir: Path
    """Exists; rank 0 writes metrics.jsonl and result.json there."""
    run_facts: dict[str, Any]
    """Settings for result.json: {stage, overrides, config_hash}."""
    sample_prompts: Sequence[str] | None = None
    """Texts to continue at the end; None: the beginning of the validation text."""
    profile: bool = False
    memory_snapshot: bool = False
    model_flops: clock.ModelFlops | None = None
    """For MFU; None where it is not known."""
    console: Console = field(default_factory=Console)
    """Rank 0 shows its progress there."""
    sinks: Sequence[result.MetricSink] = ()
    """Rank 0 sends metrics there, beside metrics.jsonl and the console; `run` closes them."""
    exit_code_when_stopped: int | None = None
    """`exit_code` in result.json after a stop by a signal; None: 130 for SIGINT, else 0."""
    begin: Callable[[int], None] = lambda step: None
    """Told the number of each step, from 1, as it begins."""
    num_workers: int = 0
    """Processes for reading the training data ahead."""
    collate_fn: Collate | None = None
    """Makes a batch of items; None: torch's default_collate."""
    loss_over: str = AUTO
    """The things over which the loss of a micro-batch is the mean, and so its weight in a step; see `TrainConfig`."""
    data_checked: Mapping[str, Any] | None = None
    """Fingerprint of the data when it was checked, see `zerotrain.data.fetch`; None if it was not."""
    data_state: Mapping[str, Any] | None = None
    """The run's position in the data: {rows_consumed, seed, order_version, fingerprint}. The run goes on at the given
    position, with whatever ranks and batch size; None: behind `first_step` batches of this size. After each step it is
    the position behind that step."""
    first_step: int = 0
    """Global batches of the engine's training before; metrics.jsonl is gone on with where it is there."""
    skipped_before: int = 0
    """Skipped ones among them, which are no updates to the schedule."""
    checkpoint: checkpoints.CheckpointPolicy | None = None
    """When to save, and what to go on from; None: neither."""
    settings: Mapping[str, Any] | None = None
    """The run's settings as checkpoints note them: nested dicts of values that JSON can hold."""
    pruning: Callback | None = None
    """Ends a poor job of a sweep: `zerotrain.training.callbacks.early_stopping`."""
    mirror: Callback | None = None
    """Copies checkpoints to another place: `zerotrain.training.callbacks.mirror`."""
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    """The user's own by name, the same on all ranks; they are called in this order."""

    def __post_init__(self) -> None:
        if not 0 <= self.skipped_before <= self.first_step <= self.max_steps:
            raise ValueError(
                f"first_step={self.first_step} must be in 0..{self.max_steps}, which is max_steps, and "
                f"skipped_before={self.skipped_before} in 0..first_step"
            )
        self.feed = feed.TrainingFeed(
            self.dataset,
            self.validation_sets,
            engine=self.engine,
            seed=self.seed,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.gradient_accumulation_steps,
            first_step=self.first_step,
            num_workers=self.num_workers,
            collate=self.collate_fn,
            loss_over=self.loss_over,
        )
        self.result = result.RunResult(
            world_size=self.world.size, steps=self.first_step, skipped_steps=self.skipped_before, **self.run_facts
        )
        if self.world.rank > 0:
            self.console, self.sinks = Console(quiet=True), ()
        self._verifying: Any = None
        if self.verify_every:
            from zerotrain.training.callbacks.verification import RunVerification  # few runs need it

            self._verifying = RunVerification(self.engine, self.verify_every)
        self.clock = clock.StepClock()
        self.checkpoints = checkpoints.RunCheckpoints(
            self.engine, self.run_dir, policy=self.checkpoint, console=self.console, settings=self.settings
        )
        self._metrics = TrainingMetrics(self.callbacks, self.engine, self.feed.sampler)
        self._callbacks = self._list_callbacks()

    def _list_callbacks(self) -> CallbackList:
        """All callbacks of a run. After a step they are called from first to last, at the end from last to first:

        - the user's own come before the save of their state, and see a step logged and at its stage;
        - an evaluation comes before the save of the same step, which it may ask for;
        - the last step is saved before anything else ends; what the user's log at the end still finds the file open.
        """
        sampler, stages = self.feed.sampler, RunStages(self.stages, self.gradient_accumulation_steps)
        run_evaluation = evaluation.RunEvaluation(
            self.console,
            num_batches=self.eval_batches,
            every=self.eval_every,
            evaluated_at=self.first_step or None,
            engine=self.engine,
            world=self.world,
            dataset=self.dataset.validation,
            validation_sets=self.validation_sets,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            collate=self.collate_fn,
            loss_over=self.loss_over,
            metrics=metrics_in(self.callbacks, OF_VALIDATION),
        )
        verifying = [] if self._verifying is None else [self._verifying]
        verified = "" if self._verifying is None else self._verifying.describe()
        num_eval_rows = evaluation.num_eval_rows(self.eval_batches)
        head: list[Callback] = [
            record.StepRecord(sampler),
            loggers.Sinks(self.sinks),
            self._metrics,
            measuring.Measuring(
                self.clock, self.feed, stages, self._metrics, model_flops=self.model_flops, log_every=self.log_every
            ),
            sample.Sample(num_tokens=self.sample_tokens, prompts=self.sample_prompts, seed=self.seed),
            stages,
            RunFreezing(self.engine, self.console, self.frozen),
            console.ShowStart(stages, sampler, self.validation_sets, num_eval_rows, verified),
            console.ShowProgress(),
            profile.Recording(trace=self.profile, memory=self.memory_snapshot),
        ]
        pruning = [] if self.pruning is None else [self.pruning]
        control = Control(self.run_dir / ASKED, self.world, self.console)
        mirror = [] if self.mirror is None else [self.mirror]
        tail = [*verifying, run_evaluation, *pruning, *mirror, self.checkpoints.best, self.checkpoints, control]
        return CallbackList(head, self.callbacks, tail, world=self.world, console=self.console)

    def run(self) -> dict[str, Any]:
        """Train, evaluate, show a sample and the report; return the body of result.json. Collective.

        result.json is written however the run ends, as long as this process can. A run that is told to stop ends after
        a step, and saves what it has trained.

        Raises:
            CheckpointError: no checkpoint to go on from can be taken up; or, after all else, a save has failed.
            CallbackError: a callback of the user has raised.
        """
        run = Run(
            engine=self.engine,
            world=self.world,
            dataset=self.dataset,
            console=self.console,
            folder=self.run_dir,
            max_steps=self.max_steps,
            result=self.result,
            clock=self.clock,
            callbacks=self._callbacks,
            state=self._state,
            settings=self.settings,
            rising=rising_metrics(self.callbacks),
        )
        RowPlace.stop_s = math.inf
        with stop_requests(self._note_stop) as stop:
            try:
                self._begin(run)
                self._train(run, stop)
                self._callbacks.call("end", run)
                self.result.end(run.stopped_by, self.max_steps, run.failed_saves, self.exit_code_when_stopped)
            except BaseException as error:
                is_stop = stop.at_once or isinstance(error, KeyboardInterrupt)
                self.result.status = "stopped" if is_stop else "failed"
                self.result.exit_code = 128 + (stop.signum or signal.SIGINT) if is_stop else 1
                self.result.error = printable(f"{type(error).__name__}: {error}")
                self._callbacks.failure(run, error)
                raise
            finally:
                if self.world.rank == 0:
                    self.result.write(self.run_dir)
        if run.is_last:
            self._callbacks.call("completed", run)
        if run.failed_saves is not None:
            raise run.failed_saves
        return self.result.body()

    def _note_stop(self, signum: int) -> None:
        self.engine.signal, RowPlace.stop_s = signum, time.monotonic()

    def _begin(self, run: Run) -> None:
        """Be where the run is to go on, and start the callbacks. Collective."""
        self._callbacks.call("prepare", run)
        if (resumed := self.checkpoints.resume()) is not None:
            self._go_on(resumed)
        self.feed.agree(self.data_state, self.data_checked)
        if resumed is not None and self.world.rank == 0:
            # Nothing can be refused any more: the run's folder gets the lines of the steps before.
            self.checkpoints.take_over(resumed)
            for name in (result.METRICS_NAME, result.STEPS_NAME):
                result.keep_lines(resumed.path.parent.parent / name, self.run_dir / name, until=self.first_step)
        self.data_state = self.feed.sampler.state_dict()
        # A model of `from_pretrained` is in evaluation mode: dropout does nothing.
        self.engine.train()
        self._callbacks.start(run)

    def _go_on(self, resumed: checkpoints.ResumePoint) -> None:
        """Be where the run of a checkpoint was."""
        if resumed.step > self.max_steps:
            problem = f"train.max_steps: got {self.max_steps}, but {resumed.path} is of step {resumed.step}"
            raise ConfigError(f"{problem}; it must be that step or more")
        state = resumed.state
        self.first_step, self.skipped_before = resumed.step, state["skipped_steps"]
        self.data_state = state["data"]
        self.result.load_state_dict(state["result"])
        self.result.steps, self.result.resumed_from = self.first_step, str(resumed.path)
        self.feed.first_step = self.first_step
        self.clock.load_state_dict(state["clock"])
        self._callbacks.load_state_dict(state)

    def _state(self) -> dict[str, Any]:
        """The run's state for a checkpoint: `_go_on` reads it."""
        return {
            "data": dict(self.data_state or {}),
            "skipped_steps": self.result.skipped_steps,
            "result": self.result.state_dict(),
            "run": {**self.run_facts, "run_dir": str(self.run_dir)},
            "clock": self.clock.state_dict(),
            **self._callbacks.state_dict(),
        }

    def _train(self, run: Run, stop: StopRequest) -> None:
        """Train to the last step, or to a stop. Collective."""
        verifying = self._verifying
        further = {} if verifying is None else {"further": verifying.verification.turns.virtual_ranks}
        with self.feed.loader(self.max_steps - self.first_step, **further) as loader:
            for step in range(self.first_step, self.max_steps):
                self.begin(step + 1)
                set_rates(self.engine.param_groups, self.schedule(step - self.result.skipped_steps, self.max_steps))
                self._callbacks.call("before_step", run)
                try:
                    with self.clock:
                        micro_batches, weights, counts = self.feed.next_step(loader)
                        read_counts = reading(counts)
                        seed_each = partial(sameness.seed_leaf, self.seed, step)
                        wishes = Request(signal=stop.signum) | self._callbacks.ask(run)
                        self.engine.signal = wishes.encoded(self._callbacks.names)
                        measuring = self._metrics.of_step(step + 1, micro_batches, self.feed.counts)
                        step_arguments = {"weights": weights, "before_each": seed_each, **measuring}
                        if verifying is not None:
                            rows = self.feed.further
                            step_arguments |= verifying.begin(step + 1, rows, micro_batches, step_arguments)
                        outcome = self.engine.train_step(micro_batches, **step_arguments)
                except RowError as error:
                    if isinstance(error.__cause__, StopTimeoutError) and step > self.first_step:
                        run.asked = self._stop_of_all(stop.signum)
                    if not run.stopped_by:
                        raise
                    report.say(self.console, f"the run ends before step {step + 1}: {printable(str(error))}")
                    return
                num_labels, num_tokens = read_counts()  # only now: the step has waited for the device anyway
                self.clock.count(num_tokens, loader.wait_s, num_labels=num_labels, traffic=self.engine.ledger.last_step)
                self.feed.step_done()
                self.data_state = self.feed.sampler.state_dict()
                self.result.skipped_steps += outcome.skipped
                self.result.steps = step + 1
                run.asked = decoded(outcome.signals, self._callbacks.names)
                self._callbacks.call("after_step", run, outcome)
                if run.stopped_by:
                    return

    def _stop_of_all(self, signum: int) -> Request:
        """The joint request where all ranks were told to stop and have given up the step that comes next: no collective
        of it has begun, so that the last one can be saved. An empty one where others may wait in it.

        Args:
            signum: that came to this rank, which has given it up.
        """
        if self.world.size == 1:
            return Request(signal=signum)
        with suppress(CommError):  # another rank is gone
            notes = self.engine.collectives.notes(f"not read after step {self.result.steps}")
            notes.leave(str(self.world.rank), signum)
            notes.count("ranks", 1)
            until_s = time.monotonic() + _ALL_UNREAD_S
            while time.monotonic() < until_s:
                if notes.count("ranks") == self.world.size:
                    return decoded([notes.read(str(rank)) for rank in range(self.world.size)])
                time.sleep(0.1)
        return Request()

    def leaf(self, virtual_rank: int) -> dict[str, torch.Tensor]:
        """The gradient that a virtual rank will add in the next step: `engine.leaf`. Collective at stage 3."""
        micro_batches, weights = self.feed.leaf(virtual_rank)
        seed_each = partial(sameness.seed_leaf, self.seed, self.result.steps)
        return self.engine.train().leaf(virtual_rank, micro_batches, weights=weights, before_each=seed_each)
