"""Destinations of metrics."""

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from zerotrain.files.lock import whole
from zerotrain.files.untrusted import UntrustedFileError, only_regular, parse_json
from zerotrain.training.figures.result import RunResult, without_non_finite

METRICS_NAME = "metrics.jsonl"
STEPS_NAME = "steps.jsonl"
"""A line for each step, see `zerotrain.training.loggers.record`."""


class _MetricsLine(TypedDict):
    step: float


class MetricSink(Protocol):
    """Takes the metrics of a run: a file, the console, or a service such as TensorBoard. Only rank 0 has any."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Take what was measured after so many steps: of training ("train_loss" and more) or of an evaluation
        ("val_loss"). A number may be nan or infinite; None is what is not known."""

    def close(self) -> None:
        """The run is over, however it ended."""


class ResumableSink(MetricSink, Protocol):
    """One that goes on where it was, such as in the same run of a tracking service: checkpoints keep its state."""

    def state_dict(self) -> dict[str, Any]:
        """Values that JSON can hold, such as the id of the service's run."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before anything is logged, where a run goes on."""


def log_to(sinks: Sequence[MetricSink], result: RunResult, metrics: dict[str, Any]) -> None:
    """Send metrics to each of the sinks, as those of the last step that is done."""
    for sink in sinks:
        sink.log(metrics, result.steps)


def states_of(sinks: Sequence[MetricSink]) -> list[dict[str, Any] | None]:
    """The state of each sink that has one, for `restore_states`."""
    return [sink.state_dict() if hasattr(sink, "state_dict") else None for sink in sinks]


def restore_states(sinks: Sequence[MetricSink], states: Sequence[dict[str, Any] | None]) -> None:
    """Give sinks the states that as many gave in the same order."""
    for sink, state in zip(sinks, states, strict=False):
        if state is not None and hasattr(sink, "load_state_dict"):
            sink.load_state_dict(state)


class MetricsFile:
    """metrics.jsonl: one JSON object a line, readable while the run goes on.

    Args:
        append: go on with a file already there, in place of writing it anew.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        self._file = open(path, "a" if append else "w", buffering=1, opener=only_regular)  # noqa: SIM115 - closed by `close`

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Append one line; a number that is nan or infinite becomes null.

        Raises:
            FileNotFoundError: the file was deleted meanwhile. Nobody could read what is written to it.
        """
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "Deleted while it was written", str(self._path))
        self._file.write(json.dumps({"step": step} | without_non_finite(metrics)) + "\n")

    def close(self) -> None:
        """See `MetricSink.close`."""
        self._file.close()


def keep_lines(source: Path, target: Path, *, until: int) -> None:
    """Write the lines of a metrics.jsonl, or of a steps.jsonl, that belong to the first so many steps to another, or to
    itself: a run that goes on from step 100 comes to the steps after it again. Nothing where there is no such file."""
    if not source.exists():
        return
    with open(source, "rb", opener=only_regular) as lines, whole(target) as kept:
        kept.writelines(line for line in lines if _step_of(line) <= until)


def _step_of(line: bytes) -> float:
    """Infinite for a line that is cut off."""
    try:
        return float(parse_json(line, _MetricsLine)["step"])
    except UntrustedFileError:
        return math.inf
