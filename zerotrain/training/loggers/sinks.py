"""metrics.jsonl and the sinks of a loop of one's own, as a callback."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.sinks import METRICS_NAME, MetricsFile, MetricSink, restore_states, states_of


class Sinks(Callback):
    """Sends metrics to metrics.jsonl and to each sink, which it closes however the run ends."""

    ranks = "first"

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._given, self._open = sinks, list(sinks)

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        self._open.insert(0, MetricsFile(run.folder / METRICS_NAME, append=run.step > 0))

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.log`."""
        for sink in self._open:
            sink.log(metrics, run.step)

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        with ExitStack() as stack:
            while self._open:
                stack.callback(self._open.pop(0).close)

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        self.end(run)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"sinks": states_of(self._given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        restore_states(self._given, state["sinks"])
