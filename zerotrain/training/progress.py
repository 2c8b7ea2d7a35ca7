"""What the user watches: a bar in a terminal, a few plain lines anywhere else."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

MAX_PLAIN_LINES = 10


class ProgressDisplay:
    """Shows how far training is. Use as a context manager; print through `console` while it is open.

    Args:
        console: where to; a quiet one shows nothing.
        max_steps: steps of the run.
    """

    def __init__(self, *, console: Console, max_steps: int) -> None:
        self._console = console
        self._max_steps = max_steps
        self._num_plain_lines = 0
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=max_steps)

    def advance(self) -> None:
        """One more step is done."""
        self._bar.advance(self._task)

    def describe(self, num_steps: int, description: str) -> None:
        """Show what was measured after so many steps; outside a terminal at most once in a tenth of the run."""
        self._bar.update(self._task, description=description)
        num_due_lines = num_steps * MAX_PLAIN_LINES // self._max_steps
        if not self._console.is_terminal and (num_due_lines > self._num_plain_lines or num_steps == 1):
            self._num_plain_lines = num_due_lines
            self._console.print(f"step {num_steps}/{self._max_steps}  {description}", soft_wrap=True, highlight=False)

    def __enter__(self) -> "ProgressDisplay":
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
