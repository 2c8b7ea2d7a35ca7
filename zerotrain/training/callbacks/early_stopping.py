"""The end of a run that no longer becomes better."""

import math
from typing import Any, TypedDict

from zerotrain.files.untrusted import Natural, require_kind
from zerotrain.training.callback import Callback, Run
from zerotrain.training.request import Request


class _StoppingState(TypedDict):
    best: float | None
    num_worse: Natural


class EarlyStopping(Callback):
    """Asks for a stop when as many evaluations in a row as `patience` were not better than the best one before.

    Args:
        patience: evaluations.
        metric: of an evaluation, such as val_loss, val_accuracy, or val_loss/NAME of a source of a mix or of a
            further validation set. Lower is better, if the metric does not say otherwise; nan is never better.
        min_delta: what a better one is better by, at least.
    """

    def __init__(self, *, patience: int, metric: str = "val_loss", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}; it must be at least 1")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta}; it must be at least 0")
        self.metric, self._patience, self._min_delta = metric, patience, min_delta
        self._best: float | None = None
        self._num_worse = 0

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`."""
        if self.metric not in metrics:
            raise LookupError(f"metric={self.metric}: an evaluation has {', '.join(metrics)}")
        found = metrics[self.metric]
        value, best = run.badness(self.metric, found), self._best
        best = best if best is None else run.badness(self.metric, best)
        is_better = best is None or (value < best and value <= best - self._min_delta)
        if is_better and math.isfinite(value):
            self._best, self._num_worse = found, 0
        else:
            self._num_worse += 1

    def ask(self, run: Run) -> Request | None:
        """See `Callback.ask`."""
        return Request(stop=True) if self._num_worse >= self._patience else None

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"best": self._best, "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        state = require_kind(state, _StoppingState)
        self._best, self._num_worse = state["best"], state["num_worse"]
