"""Progress for the user: one line that is rewritten in a terminal, a few plain lines anywhere else."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from zerotrain.engine.results import TrainStepResult
from zerotrain.files.untrusted import duration
from zerotrain.training.callback import Callback, Run

MAX_PLAIN_LINES = 10
BAR_WIDTH = 8
SPEED_ESTIMATED_OVER_S = 3600.0
"""The speed is that of the steps in this time, of the last thousand at most. It is long, as two steps must lie in it
for the time left to be told."""
MIN_WIDTH_OF_BAR = 100
"""Columns of a terminal that has room for a bar beside the numbers."""


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


class Measured:
    """The last measurements of training and of the validation loss, each with its step."""

    def __init__(self) -> None:
        self.training: dict[str, Any] = {}
        self.trained_at = 0
        self.val_losses: dict[str, float] = {}
        """By the names in a line."""
        self.evaluated_at = 0

    def note(self, metrics: dict[str, Any], step: int) -> None:
        """Take what was measured after a step."""
        if "train_loss" in metrics:
            self.training, self.trained_at = metrics, step
        if losses := {name: loss for name, loss in metrics.items() if name.partition("/")[0] == "val_loss"}:
            self.val_losses = {name.replace("val_loss", "val", 1): loss for name, loss in losses.items()}
            self.evaluated_at = step

    def parts(self, step: int) -> list[str]:
        """The numbers, most important first. One that was not measured after `step` says its step, as in
        `val 2.456@100`."""
        parts = []
        if self.training:
            parts.append(f"loss {self.training['train_loss']:.3f}{_at(self.trained_at, step)}")
        at = _at(self.evaluated_at, step)
        val = {name: f"{name} {loss:.3f}{at}" for name, loss in self.val_losses.items()}
        parts += [said for name, said in val.items() if "/" not in name]
        parts += self._place() + self._speed_and_gradient() if self.training else []
        return parts + [said for name, said in val.items() if "/" in name]

    def _place(self) -> list[str]:
        """How much of the data was read when it was measured last."""
        parts = []
        if (epoch := self.training.get("epoch")) is not None:
            parts.append(f"epoch {epoch:.2f}")
        if (tokens := self.training.get("tokens")) is not None:
            parts.append(f"{short(tokens)} tokens")
        return parts

    def _speed_and_gradient(self) -> list[str]:
        found = self.training
        parts = [f"{found['skipped_steps']} skipped"] if found["skipped_steps"] else []
        is_of_tokens = found["tokens_per_s"] is not None
        parts.append(
            f"{found['tokens_per_s']:.0f} tok/s" if is_of_tokens else f"{found['samples_per_s']:.0f} samples/s"
        )
        if found["mfu"] is not None:
            parts.append(f"mfu {found['mfu']:.0%}")
        return [*parts, f"grad {found['grad_norm']:.2f}>{found['grad_norm_clipped']:.2f}"]


def short(number: float) -> str:
    """A number in at most three digits, such as 950, 1.2k or 34M."""
    unit, size = next(
        (unit for unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if number >= unit[1]), ("", 1)
    )
    return f"{number / size:.3g}{unit}"


def _at(measured_at: int, step: int) -> str:
    return "" if measured_at == step else f"@{measured_at}"


def _left(task: Task) -> list[str]:
    """The time left, where there is any and it can be told."""
    is_done = task.total is None or task.completed >= task.total
    return [] if is_done or task.time_remaining is None else [f"{duration(task.time_remaining)} left"]


class ProgressDisplay:
    """Shows on a console how far training is, and what was measured. Print through `console` until
    it is closed; a quiet one shows nothing."""

    def __init__(self, *, console: Console, max_steps: int, first_step: int = 0) -> None:
        self._console = console
        self._max_steps = max_steps
        self._num_due_lines = -1
        """Plain lines due up to the last one shown; the first step that is logged is always shown."""
        self._measured = Measured()
        self._step = first_step
        self._shown_evaluation = 0
        """Step of the evaluation in the last plain line."""
        self._is_plain = not console.is_terminal or console.is_dumb_terminal
        """Whether no line can be rewritten."""
        has_bar = console.width >= MIN_WIDTH_OF_BAR
        columns: list[ProgressColumn] = [_Line(console, self._measured, beside=BAR_WIDTH + 1 if has_bar else 0)]
        if has_bar:
            columns.append(BarColumn(bar_width=BAR_WIDTH))
        self._line = Progress(
            *columns, console=console, disable=self._is_plain, speed_estimate_period=SPEED_ESTIMATED_OVER_S
        )
        self._task = self._line.add_task("", total=max_steps, completed=first_step)
        self._line.start()

    def advance(self) -> None:
        """One more step is done."""
        self._step += 1
        self._line.advance(self._task)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Show what was measured after a step; outside a terminal at most once in a tenth of the run."""
        self._step = step
        self._measured.note(metrics, step)
        num_due_lines = step * MAX_PLAIN_LINES // self._max_steps
        if "train_loss" in metrics and num_due_lines > self._num_due_lines:
            self._num_due_lines = num_due_lines
            self._print_plain()

    def close(self) -> None:
        """The run is over, however it ended. The last line has the last evaluation."""
        self._line.stop()
        if self._measured.training and self._measured.evaluated_at > self._shown_evaluation:
            self._print_plain()

    def _print_plain(self) -> None:
        if self._is_plain:
            self._shown_evaluation = self._measured.evaluated_at
            parts = self._measured.parts(self._step) + _left(self._line.tasks[0])
            line = f"step {self._step}/{self._max_steps}  {' '.join(parts)}"
            self._console.print(line, soft_wrap=True, highlight=False)


class _Line(ProgressColumn):
    """Steps done, the time left and as many of the numbers as the terminal has room for: none is cut.

    Args:
        beside: columns of the terminal that others take.
    """

    def __init__(self, console: Console, measured: Measured, *, beside: int) -> None:
        self._console, self._measured, self._beside = console, measured, beside
        super().__init__()

    def render(self, task: Task) -> Text:
        """See `ProgressColumn.render`."""
        step, max_steps = round(task.completed), round(task.total or 0)
        parts = [f"{step}/{max_steps}", *_left(task), *self._measured.parts(step)]
        while len(parts) > 1 and len(" ".join(parts)) > self._console.width - self._beside:
            parts.pop()
        return Text(" ".join(parts), no_wrap=True)
