"""The end of a run that no longer becomes better."""

import math
from typing import Any

from zerotrain.files.untrusted import Natural, require_schema
from zerotrain.training.callback import Callback, Run
from zerotrain.training.request import Request


class EarlyStopping(Callback):
    """Asks for a stop when as many evaluations in a row as `patience` were not better than the best one before.

    Args:
        patience: evaluations.
        metric: of an evaluation, such as val_loss, or val_loss/NAME of a source of a mix. Lower is better; nan is
            never better.
        min_delta: what a better one is lower by, at least.
    """

    def __init__(self, *, patience: int, metric: str = "val_loss", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}; it must be at least 1")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta}; it must be at least 0")
        self._patience, self._metric, self._min_delta = patience, metric, min_delta
        self._best: float | None = None
        self._num_worse = 0

    def after_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """See `Callback.after_evaluation`."""
        if self._metric not in metrics:
            raise LookupError(f"metric={self._metric}: an evaluation has {', '.join(metrics)}")
        value = metrics[self._metric]
        is_better = self._best is None or (value < self._best and value <= self._best - self._min_delta)
        if is_better and math.isfinite(value):
            self._best, self._num_worse = value, 0
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
        require_schema(state, {"best": (float, None), "num_worse": Natural()})
        self._best, self._num_worse = state["best"], state["num_worse"]
