"""The checkpoints of a run: saved while it trains, or resumed from."""

import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta
from rich.console import Console

from zerotrain.checkpoint import folder as folders
from zerotrain.checkpoint.manifest import MANIFEST, read_manifest
from zerotrain.engine import OF_THIS_MACHINE, Hyperparameters, restored, saved_group
from zerotrain.engine.engine import ZeroEngine, take_up
from zerotrain.engine.results import TrainStepResult
from zerotrain.engine.state.save import SaveUnderWay
from zerotrain.errors import CheckpointError, ConfigError, TrainingError
from zerotrain.files.untrusted import Natural, UntrustedFileError, dotted, require_kind
from zerotrain.training.callback import Callback, Run
from zerotrain.training.clock import ClockState
from zerotrain.training.metrics.metric import is_metrics_state
from zerotrain.training.report import in_unit, say
from zerotrain.training.request import Request
from zerotrain.training.result import RunResult
from zerotrain.training.sameness import generator_states, restore_generators

# The checkpoint of the best evaluation of a run.


@dataclass(frozen=True)
class BestEvaluation:
    """An evaluation better than all before it."""

    metric: str
    value: float
    step: Natural


class BestCheckpoint(Callback):
    """Follows a metric of the evaluations, and lets a link name the checkpoint of the best one. All ranks have one, and
    `RunCheckpoints` saves and tells it what came of that.

    Args:
        metric: of an evaluation, such as val_loss, val_accuracy, or val_loss/NAME of a source of a mix or of a
            further validation set. Lower is better, if the metric does not say otherwise; nan is never better. None:
            nothing is followed.
        folder: of the run's checkpoints.
    """

    def __init__(self, metric: str | None, folder: Path, engine: ZeroEngine, console: Console) -> None:
        self._metric, self._folder, self._console = metric, folder, console
        self._engine, self._is_first = engine, engine.world.rank == 0
        self._saved: BestEvaluation | None = None
        self._unsaved: list[BestEvaluation] = []
        """Better ones, each than the one before, whose checkpoints are not on the disk yet."""
        self.resumed_from: Path | None = None
        """The checkpoint to go on from."""

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`. The evaluation before the first step is of nothing that was trained."""
        if self._metric is None or run.step == 0:
            return
        if self._metric not in metrics:
            raise ConfigError(f"checkpoint.best: got {self._metric}; an evaluation has {', '.join(metrics)}")
        value, best = metrics[self._metric], self._best
        is_better = best is None or run.badness(self._metric, value) < run.badness(self._metric, best.value)
        if math.isfinite(value) and is_better:
            self._unsaved.append(BestEvaluation(self._metric, value, run.step))

    def is_due(self, step: int) -> bool:
        """Whether the evaluation after this step is the best one, and its checkpoint is still to be saved."""
        return any(item.step == step for item in self._unsaved)

    def note_saved(self, path: Path) -> None:
        """A checkpoint is on the disk: let the link name it, if it is the best one. No earlier one is under way."""
        best = next((item for item in self._unsaved if folders.step_name(item.step) == path.name), None)
        if best is None:
            return
        self._saved, self._unsaved = best, [item for item in self._unsaved if item.step > best.step]
        if self._is_first:
            self._link(path)
            name = f"{folders.CHECKPOINTS}/{folders.BEST}"
            say(self._console, f"{name} is {path.name}, of {self._metric} {best.value:.4f}")

    def note_failed(self, path: Path) -> None:
        """A checkpoint could not be saved: the best one is that of before."""
        self._unsaved = [item for item in self._unsaved if folders.step_name(item.step) != path.name]

    def link_best(self) -> None:
        """The run goes on: let the link name the best checkpoint before. For rank 0 alone."""
        try:
            folders.remove_half_links(self._folder)
        except CheckpointError as error:
            say(self._console, f"warning: {error}")
        if self._saved is not None:
            self._link(self._folder / folders.step_name(self._saved.step))
        elif (target := folders.best_in(self._folder)) is not None and not target.exists():  # it was set aside
            self._link(None)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {} if self._best is None else {"best": asdict(self._best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best one before, if its checkpoint is in this run's folder. Collective."""
        best = state.get("best")
        if best is None or best["metric"] != self._metric or self.resumed_from is None:
            return
        is_own = self.resumed_from.parent.resolve() == self._folder.resolve()
        is_there = is_own and os.path.isfile(self._folder / folders.step_name(best["step"]) / MANIFEST)
        [is_there, *_] = self._engine.collectives.gather_objects(is_there, name="whether the best checkpoint is there")
        if is_there:
            self._saved = BestEvaluation(best["metric"], best["value"], best["step"])

    @property
    def _best(self) -> BestEvaluation | None:
        return self._unsaved[-1] if self._unsaved else self._saved

    def _link(self, path: Path | None) -> None:
        try:
            folders.set_best(path, self._folder)
        except CheckpointError as error:
            say(self._console, f"warning: {error}")


# The contents that a run's state may have in a checkpoint.


_Object = dict[str, Any]


class _SavedResult(TypedDict, total=False):
    skipped_steps: Natural
    final_train_loss: float | None
    final_val_loss: float | None
    val_loss_by_source: _Object | None
    val_metrics: _Object | None
    stages: list[_Object]


AskedStages = dict[Annotated[int, Meta(ge=0, lt=10**18)], Annotated[int, Meta(ge=0, le=3)]]
"""Stages asked for by operators: steps done, as a text, and the stage from there on."""


class _SavedState(TypedDict):
    data: _Object
    skipped_steps: Natural
    evaluated_at: int | None
    result: _SavedResult
    clock: ClockState
    sinks: list[_Object | None]
    asked_stages: AskedStages
    callbacks: NotRequired[dict[str, _Object]]
    frozen: NotRequired[list[str]]
    best: NotRequired[BestEvaluation]
    training_metrics: NotRequired[Any]


class _Extra(TypedDict):
    built_groups: list[_Object]
    run: _SavedState


def require_run_state(path: Path, state: Any) -> None:
    """Refuse a state of a run in a checkpoint if it is of another form, with a CheckpointError."""
    try:
        run = require_kind(state, _Extra)["run"]
    except UntrustedFileError as error:
        raise CheckpointError(f"{path} does not hold the state of its run: {error}") from None
    if "training_metrics" in run and not is_metrics_state(run["training_metrics"]):
        raise CheckpointError(f"{path} does not hold the state of its run: run.training_metrics: no numbers of metrics")


OF_TRAINER = "trainer"
"""The name of a run's state in `extra`."""
FREE = ("launch.", "checkpoint.", "zero.", "sweep.")
"""Settings that may change in a run and change nothing of what it computes, but for `NOT_FREE`."""
NOT_FREE = ("launch.threads_per_rank", "zero.reduction", "zero.accumulate")


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When a run saves, what it keeps, and what it goes on from."""

    every_steps: int | None = None
    every_s: float | None = None
    """By the clock of rank 0."""
    keep: int | None = 2
    """As many of the newest; None: all."""
    keep_every: int | None = None
    """Those of each so many steps stay."""
    asynchronous: bool = True
    """Write beside the training."""
    best: str | None = None
    """Metric of an evaluation whose best checkpoint stays too, see `BestCheckpoint`; it is saved at once."""
    at_end: bool = True
    """Save after the last step."""
    resume: Sequence[Path] = ()
    """Checkpoints to go on from, the best first: the first is taken that is what was written. None: start anew."""
    init_from: Path | None = None
    """Weights for a new run."""
    strict: bool = True
    """All of them or none; False: what fits."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint taken up."""

    path: Path
    step: int
    state: dict[str, Any]
    """The `Run.state` of its run."""


@dataclass(eq=False)
class RunCheckpoints(Callback):
    """The checkpoints of one run. All ranks have one, and call the same."""

    engine: ZeroEngine
    run_dir: Path
    """They lie in its folder `checkpoints`."""
    _: KW_ONLY
    policy: CheckpointPolicy | None
    console: Console
    settings: Mapping[str, Any] | None
    """Noted in each: nested dicts of what JSON can hold."""

    def __post_init__(self) -> None:
        self._policy, self._is_first = self.policy or CheckpointPolicy(at_end=False), self.engine.world.rank == 0
        self._folder = self.run_dir / folders.CHECKPOINTS
        self.best = BestCheckpoint(self._policy.best, self._folder, self.engine, self.console)
        self._under_way: SaveUnderWay | None = None
        self._begun_s = time.monotonic()
        """When the newest save was begun; before the first, when this was made."""
        self._removal: threading.Thread | None = None
        self._failures: list[str] = []
        self._built_groups = [saved_group(group) for group in self.engine.param_groups]
        """Hyperparameters as the settings have them, before anything was loaded."""
        self._pauses_s: list[float] = []
        self._step_times_s: dict[bool, list[float]] = {False: [], True: []}
        """Times of steps without a save beside them, and with one."""
        self.newest: Path | None = None
        """The last one on the disk, as far as this process has seen."""

    def resume(self) -> ResumePoint | None:
        """Resume from the first intact one of the policy's checkpoints; say which were skipped, and why. If there are
        none, begin with the weights that the policy names, if it does. Collective.

        Hyperparameters that are set otherwise than when the run was first started are those of now.

        Raises:
            CheckpointError: there are some, and none can be taken up. On every rank.
        """
        checkpoint, problems = folders.first_whole(self._policy.resume, partial(take_up, self.engine))
        if checkpoint is None:
            if problems:
                [*_, path] = self._policy.resume
                if len(folders.checkpoints_in(path.parent)) > len(self._policy.resume):
                    problems.append(f"checkpoint.resume={path.parent} goes on from the newest whole one there")
                raise CheckpointError("\n".join(problems))
            if (weights := self._policy.init_from) is not None:
                say(self.console, *self.engine.load_weights(weights, strict=self._policy.strict).told())
            return None
        path, (extra, dropped) = checkpoint
        if not isinstance(extra, dict) or not isinstance(state := extra.get(OF_TRAINER), dict):
            raise CheckpointError(
                f"{path} was not saved by a run of launch.py or a Trainer, so its position in the data is unknown; a "
                "run can only start from its weights"
            )
        require_run_state(path, state)
        say(self.console, *(f"warning: skipped a checkpoint that cannot be loaded: {problem}" for problem in problems))
        try:
            restore_generators(self.engine.module, self.engine.own_of(path))
        except (TypeError, ValueError, LookupError, RuntimeError, AttributeError):  # each kind has errors of its own
            raise CheckpointError(f"{path} holds states of random generators that are not valid") from None
        step, self.newest = self.engine.stamps.num_steps, path
        self.best.resumed_from = path
        say(self.console, f"resumes from {path}, step {step}")
        if dropped is not None:
            say(self.console, f"warning: {dropped}; callbacks=ema would go on with it")
        take_changed(self.engine.param_groups, old=state["built_groups"], new=self._built_groups)
        return ResumePoint(path, step, state["run"])

    def take_over(self, resumed: ResumePoint) -> None:
        """All ranks go on from this checkpoint: say the settings that have changed, and set aside later checkpoints of
        this run's own folder. For rank 0 alone."""
        say(self.console, *self._changed_settings(resumed.path))
        # The run comes to later steps again, and never replaces anything.
        for path in folders.checkpoints_in(self._folder):
            step = folders.step_of(path)
            if step > resumed.step or (step == resumed.step and path != resumed.path):
                aside = folders.set_aside(path)
                say(self.console, f"{path.name} is later than that, and was renamed to {aside.name}")
        self.best.link_best()

    def _changed_settings(self, path: Path) -> Iterator[str]:
        """A line for each setting changed since the checkpoint, unless it changes no number."""
        config = read_manifest(path).content["config"]
        old, new = dotted(config if isinstance(config, dict) else {}), dotted(self.settings or {})
        for name in sorted(old.keys() | new.keys()) if old and new else ():
            is_free = name.startswith(FREE) and name not in NOT_FREE
            if not is_free and old.get(name) != new.get(name):
                values = [json.dumps(settings.get(name)) for settings in (old, new)]
                yield f"  {name}: {values[0]} until now, {values[1]} from here on"

    def ask(self, run: Run) -> Request:
        """See `Callback.ask`."""
        every_s = self._policy.every_s
        is_due = every_s is not None and time.monotonic() - self._begun_s >= every_s
        return Request(save=self._is_first and is_due)

    def start(self, run: Run) -> None:
        """Save what was evaluated here before the next step, where a stop came before, if it is the best."""
        if self.best.is_due(run.step):
            self._save(run, wait=False)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """Say what has come of a save beside this step, if that has ended, and save where it is due."""
        self._step_times_s[self._under_way is not None].append(run.clock.last_s)
        if self._under_way is not None and self._under_way.is_done:
            self._settle(run)
        every = self._policy.every_steps
        is_due = (every is not None and run.step % every == 0) or self.best.is_due(run.step)
        if (run.asked.save or is_due) and not run.stopped_by:
            self._save(run, wait=False)

    def end(self, run: Run) -> None:
        """Save after the last step, if the policy says so, or where the run was stopped; wait for what is under way."""
        if self._policy.at_end or run.stopped_by:
            self._save(run, wait=True)
        self._finish(run)
        if self._failures:
            run.failed_saves = CheckpointError("\n".join(self._failures))

    def failure(self, run: Run, error: BaseException) -> None:
        """Wait for what is under way, if all ranks do."""
        if isinstance(error, TrainingError):  # of all ranks alike
            self._finish(run)
        self._note_in(run.result)

    def _save(self, run: Run, *, wait: bool) -> None:
        """Begin to save what is trained now, and return: the rest comes beside the training. Collective.

        Args:
            wait: until it is on the disk, or has failed.
        """
        self._settle(run)
        path = self._folder / folders.step_name(run.step)
        if self.newest == path:
            if self.best.is_due(run.step):
                self._take_its_place(path)
            return
        self._begun_s = time.monotonic()
        run.callbacks.call("before_save", run)
        extra = None
        if self._is_first:  # measurements differ by rank; those of rank 0 are the run's
            extra = {OF_TRAINER: {"run": run.state(), "built_groups": self._built_groups}}
        [extra, *_] = self.engine.collectives.gather_objects(extra, name="what a checkpoint holds beside")
        own = generator_states(self.engine.module)
        try:
            self._under_way = self.engine.begin_save(path, extra=extra, config=self.settings, own=own)
        except CheckpointError as error:
            self._note_failure(path, error)
            return
        if wait or not self._policy.asynchronous:
            self._settle(run, waited=True)

    def _note_in(self, result: RunResult) -> None:
        """Say which checkpoint is the newest, and what saves have cost: the mean time that one held the training of
        this rank, and the median time of a step beside one to that of the others."""
        result.checkpoint = None if self.newest is None else str(self.newest)
        if self._pauses_s:
            result.save_pause_ms = 1e3 * statistics.mean(self._pauses_s)
        if all(self._step_times_s.values()):
            alone, beside = map(statistics.median, self._step_times_s.values())
            result.save_step_ratio = beside / alone

    def _finish(self, run: Run) -> None:
        """Wait for what is under way, and note what the saves of this run came to."""
        self._settle(run)
        self._await_removal()
        self._note_in(run.result)
        if (ratio := run.result.save_step_ratio) is not None:
            say(self.console, f"a step during a save took {ratio:.2f} times as long as the others (medians)")

    def _settle(self, run: Run, *, waited: bool = False) -> None:
        """Wait for the save that is under way, and say what came of it. Older checkpoints go then, and not before.
        Nothing was trained beside a save that is `waited` for."""
        saving, self._under_way = self._under_way, None
        if saving is None:
            return
        try:
            self.newest = saving.wait()
        except CheckpointError as error:
            self._note_failure(saving.path, error)
            return
        seconds = time.monotonic() - self._begun_s
        self._pauses_s.append(seconds if waited else saving.pause_s + saving.held_s)
        paused = "" if waited else f"; the training waited {1e3 * self._pauses_s[-1]:.0f} ms"
        size = in_unit(sum(file.stat().st_size for file in saving.path.iterdir()))
        say(self.console, f"saved {folders.CHECKPOINTS}/{saving.path.name}: {size} in {seconds:.2f} s{paused}")
        self._take_its_place(self.newest)
        run.callbacks.call("after_save", run, self.newest)

    def _take_its_place(self, path: Path) -> None:
        """Let older checkpoints go for one on the disk. It may be the best too."""
        self.best.note_saved(path)
        if self._is_first:
            self._await_removal()
            self._removal = threading.Thread(target=self._remove_old, name="remove-checkpoints", daemon=True)
            self._removal.start()

    def _note_failure(self, path: Path, error: CheckpointError) -> None:
        self.best.note_failed(path)
        self._failures.append(f"{path.name} was not saved: {error}")
        say(self.console, f"warning: {self._failures[-1]}")

    def _remove_old(self) -> None:
        try:
            folders.remove_old(self._folder, keep=self._policy.keep, keep_every=self._policy.keep_every)
        except CheckpointError as error:
            say(self.console, f"warning: {error}")

    def _await_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()


def take_changed(
    groups: Sequence[dict[str, Any]], *, old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> None:
    """Give restored groups the hyperparameters of settings changed since the save.

    Args:
        groups: of the engine, in the order of the others.
        old: as `saved_group` has them, by the settings of the run that saved.
        new: likewise, by the settings of today.
    """
    for group, old_group, new_group in zip(groups, old, new, strict=False):
        for name, value in new_group.items():
            if old_group.get(name) != value and name not in OF_THIS_MACHINE and name in group:
                group[name] = restored(value, group[name])
                if name == "lr" and isinstance(group, Hyperparameters):
                    group.first_lr = float(value)
