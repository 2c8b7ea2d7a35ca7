"""Progress for the user: a bar in a terminal, a few plain lines anywhere else."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from zerotrain.engine.results import TrainStepResult
from zerotrain.training.callback import Callback, Run

MAX_PLAIN_LINES = 10


class ShowProgress(Callback):
    """A display on rank 0 from the start of a run to its end."""

    ranks = "first"

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._display = ProgressDisplay(console=run.console, max_steps=run.max_steps, first_step=run.step)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if self._display is not None:
            self._display.advance()

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        if self._display is not None:
            self._display.log(metrics, run.step)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if self._display is not None:
            self._display.close()

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self.end(run)


class ProgressDisplay:
    """Shows on a console how far training is, and what was measured. Print through `console` until
    it is closed; a quiet one shows nothing."""

    def __init__(self, *, console: Console, max_steps: int, first_step: int = 0) -> None:
        self._console = console
        self._max_steps = max_steps
        self._num_due_lines = -1
        """Plain lines due up to the last one shown; the first step that is logged is always shown."""
        self._val_loss: float | None = None
        self._is_plain = not console.is_terminal or console.is_dumb_terminal
        """Whether there can be no bar."""
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=self._is_plain,
        )
        self._task = self._bar.add_task("", total=max_steps, completed=first_step)
        self._bar.start()

    def advance(self) -> None:
        """One more step is done."""
        self._bar.advance(self._task)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Show what was measured of training; outside a terminal at most once in a tenth of the run."""
        self._val_loss = metrics.get("val_loss", self._val_loss)
        if "train_loss" not in metrics:
            return
        description = _describe(metrics, self._val_loss)
        self._bar.update(self._task, description=description)
        num_due_lines = step * MAX_PLAIN_LINES // self._max_steps
        if self._is_plain and num_due_lines > self._num_due_lines:
            self._num_due_lines = num_due_lines
            self._console.print(f"step {step}/{self._max_steps}  {description}", soft_wrap=True, highlight=False)

    def close(self) -> None:
        """The run is over, however it ended."""
        self._bar.stop()


def _describe(metrics: dict[str, Any], val_loss: float | None) -> str:
    """The metrics of training, short enough for a terminal of 80 columns."""
    parts = [f"loss {metrics['train_loss']:.3f}"]
    if val_loss is not None:
        parts.append(f"val {val_loss:.3f}")
    parts.append(f"{metrics['tokens_per_s']:.0f} tok/s")
    if metrics["mfu"] is not None:
        parts.append(f"mfu {metrics['mfu']:.0%}")
    parts.append(f"grad {metrics['grad_norm']:.2f}>{metrics['grad_norm_clipped']:.2f}")
    if metrics["skipped_steps"]:
        parts.append(f"{metrics['skipped_steps']} skipped")
    return " ".join(parts)
