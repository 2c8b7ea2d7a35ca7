"""Curves of a run elsewhere than in metrics.jsonl."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from zerotrain.engine.options import dotted
from zerotrain.files.untrusted import UntrustedFileError, only_regular, parse_json, require_kind
from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.sinks import METRICS_NAME
from zerotrain.training.loggers.facts import uncommitted_changes

CHANGES_NAME = "git.diff"
"""File in the run's folder with the changes to the code that no commit has."""


class _MetricsRow(TypedDict):
    step: int


@dataclass
class Written:
    """The points that a place has already."""

    until: int = -1
    """All of these steps and before."""
    by_name: dict[str, int] = field(default_factory=dict)
    """The last step of a curve, where that is known."""

    def has(self, name: str, step: int) -> bool:
        """Whether the point of a curve at this step is there."""
        return step <= self.by_name.get(name, self.until)

    @property
    def last(self) -> int:
        """The last step of all."""
        return max(self.until, *self.by_name.values()) if self.by_name else self.until


class Curves(Callback):
    """Writes each number of metrics.jsonl to another place, at its step, and each point once; before them what the run
    is, and at its end its result.

    The lines of metrics.jsonl from before a run went on are written too where they are missing: the run may be in
    another folder now, or has had no such logger.
    """

    ranks = "first"
    may_fail = True
    package: ClassVar[str] = ""
    """Has the same name as the extra that brings it."""

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            raise ImportError(f"there is no {self.package} here; pip install 'zerotrain[{self.package}]' brings it")
        self._written: Written | None = None
        """None: the place is not open."""

    @abstractmethod
    def _open(self, run: Run) -> Written:
        """Open the place, and return what is there."""

    @abstractmethod
    def _describe_run(self, run: Run) -> None:
        """Send what the run is: it begins, or goes on."""

    @abstractmethod
    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Write points of one step."""

    def _keep_file(self, path: Path) -> None:
        """Send a file of the run's folder, where the place keeps files."""

    @abstractmethod
    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        """Send the result of a run, which is completed, stopped or failed; None: leave it as it was found."""

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._written = self._open(run)
        self._describe_run(run)
        if changes := uncommitted_changes():
            (run.folder / CHANGES_NAME).write_text(changes)
            self._keep_file(run.folder / CHANGES_NAME)
        for step, metrics in _lines_of(run.folder / METRICS_NAME):
            self._write_new(metrics, step)

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        self._write_new(metrics, run.step)

    def completed(self, run: Run) -> None:
        """See `Callback.completed`."""
        self._finish(run, run.result.status)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if run.stopped_by:  # else `completed` comes, which knows more
            self._finish(run, "stopped")

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self._finish(run, run.result.status)

    def _finish(self, run: Run, status: str) -> None:
        if self._written is not None:
            self._written = None
            numbers = numbers_of(dotted(run.result.body()))
            self._close_run({f"result/{name}": value for name, value in numbers.items()}, status)

    def _write_new(self, metrics: dict[str, Any], step: int) -> None:
        if (written := self._written) is None:
            return
        numbers = numbers_of(metrics)
        if new := {name: value for name, value in numbers.items() if not written.has(name, step)}:
            self._write(new, step)


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The step and the metrics of each line; nothing of one that is cut off."""
    with open(path, "rb", opener=only_regular) as lines:
        for line in lines:
            try:
                metrics = parse_json(line, dict[str, Any])
                step = require_kind(metrics, _MetricsRow)["step"]
            except UntrustedFileError:
                continue
            yield step, {name: value for name, value in metrics.items() if name != "step"}
