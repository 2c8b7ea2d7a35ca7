"""The checkpoint of the best evaluation of a run."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.checkpoint.folder import BEST, CHECKPOINTS, best_in, remove_half_links, set_best, step_name
from zerotrain.checkpoint.manifest import MANIFEST
from zerotrain.comm.world import World
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.report import say


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that was better than all before it."""

    metric: str
    value: float
    step: int


class BestCheckpoint(Callback):
    """Follows a metric of the evaluations, and lets a link name the checkpoint of the best one. All ranks have one, and
    `RunCheckpoints` saves and tells it what came of that.

    Args:
        metric: of an evaluation, such as val_loss, val_accuracy, or val_loss/NAME of a source of a mix or of a
            further validation set. Lower is better, if the metric does not say otherwise; nan is never better. None:
            nothing is followed.
        folder: of the run's checkpoints.
    """

    def __init__(self, metric: str | None, folder: Path, engine: ZeroEngine, world: World, console: Console) -> None:
        self._metric, self._folder, self._console = metric, folder, console
        self._engine, self._is_first = engine, world.rank == 0
        self._saved: Evaluated | None = None
        self._unsaved: list[Evaluated] = []
        """Better ones, each than the one before, whose checkpoints are not on the disk yet."""
        self.resumed_from: Path | None = None
        """The checkpoint that the run goes on from."""

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`. The evaluation before the first step is of nothing that was trained."""
        if self._metric is None or run.step == 0:
            return
        if self._metric not in metrics:
            raise ConfigError(f"checkpoint.best: got {self._metric}; an evaluation has {', '.join(metrics)}")
        value, best = metrics[self._metric], self._best
        is_better = best is None or run.badness(self._metric, value) < run.badness(self._metric, best.value)
        if math.isfinite(value) and is_better:
            self._unsaved.append(Evaluated(self._metric, value, run.step))

    def is_due(self, step: int) -> bool:
        """Whether the evaluation after this step is the best one, and its checkpoint is still to be saved."""
        return any(each.step == step for each in self._unsaved)

    def saved(self, path: Path) -> None:
        """A checkpoint is on the disk: let the link name it, if it is the best one. No earlier one is under way."""
        found = next((each for each in self._unsaved if step_name(each.step) == path.name), None)
        if found is None:
            return
        self._saved, self._unsaved = found, [each for each in self._unsaved if each.step > found.step]
        if self._is_first:
            self._link(path)
            say(self._console, f"{CHECKPOINTS}/{BEST} is {path.name}, of {self._metric} {found.value:.4f}")

    def failed(self, path: Path) -> None:
        """A checkpoint could not be saved: the best one is that of before."""
        self._unsaved = [each for each in self._unsaved if step_name(each.step) != path.name]

    def agreed(self) -> None:
        """The run goes on: let the link name the best checkpoint before. For rank 0 alone."""
        try:
            remove_half_links(self._folder)
        except CheckpointError as error:
            say(self._console, f"warning: {error}")
        if self._saved is not None:
            self._link(self._folder / step_name(self._saved.step))
        elif (named := best_in(self._folder)) is not None and not named.exists():  # it was set aside
            self._link(None)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {} if self._best is None else {"best": asdict(self._best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best one before, if its checkpoint is in this run's folder. Collective."""
        found = state.get("best")
        if found is None or found["metric"] != self._metric or self.resumed_from is None:
            return
        is_own = self.resumed_from.parent.resolve() == self._folder.resolve()
        is_there = is_own and os.path.isfile(self._folder / step_name(found["step"]) / MANIFEST)
        [is_there, *_] = self._engine.collectives.gather_objects(is_there, name="whether the best checkpoint is there")
        if is_there:
            self._saved = Evaluated(found["metric"], found["value"], found["step"])

    @property
    def _best(self) -> Evaluated | None:
        return self._unsaved[-1] if self._unsaved else self._saved

    def _link(self, path: Path | None) -> None:
        try:
            set_best(path, self._folder)
        except CheckpointError as error:
            say(self._console, f"warning: {error}")
