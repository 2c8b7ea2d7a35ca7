"""Metrics of the steps of a run, from the forwards that train."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zerotrain.comm.world import World
from zerotrain.training.callback import Callback, Run
from zerotrain.training.metrics.metric import OF_TRAINING, metrics_in
from zerotrain.training.metrics.states import LOSS, MAX_MICRO_BATCHES, MetricStates

PREFIX = "train_"


class TrainingMetrics(Callback):
    """The metrics of all micro-batches that were trained on since the last line, as one process would measure them. A
    step in which no line is due sends nothing for them and waits for nothing.

    Args:
        callbacks: of the user, by name, the metrics among them.
        model: see `MetricStates`.
        num_virtual_ranks: of all ranks.
        num_micro_batches: of a virtual rank in a step.
    """

    def __init__(
        self,
        callbacks: Mapping[str, Callback],
        world: World,
        *,
        num_virtual_ranks: int,
        num_micro_batches: int,
        model: Any = None,
    ) -> None:
        self._metrics, self._world, self._model = metrics_in(callbacks, OF_TRAINING), world, model
        self._num_virtual_ranks, self._num_micro_batches = num_virtual_ranks, num_micro_batches
        self._begin()

    def _begin(self) -> None:
        self._states = MetricStates(self._metrics, PREFIX, "training", self._model)
        self._num_before = self._num = 0
        """Micro-batches of all ranks since the last line: before the step of now, and with it."""

    def of_step(self, step: int, micro_batches: Sequence[Any], counts: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Arguments with which `engine.train_step` measures a step; none where there are no metrics.

        Args:
            step: its number, for messages.
            micro_batches, counts: of this rank, and (weight of each, labels that count in each).
        """
        if not self._metrics:
            return {}
        self._states.where = f"training in step {step}"
        self._num_before, self._num = self._num, self._num + self._num_virtual_ranks * self._num_micro_batches
        measured = iter(zip(micro_batches, *counts, strict=True))
        return {"after_each": partial(self._measure, measured), "with_outputs": self._states.needs_outputs}

    def _measure(self, measured: Any, virtual_rank: int, index: int, loss: torch.Tensor, outputs: Any) -> None:
        """The next of this rank's micro-batches has had its forward."""
        batch, weight, num_labels = next(measured)
        number = self._num_before + index * self._num_virtual_ranks + virtual_rank
        self._states.add(number, loss, weight, outputs, batch, num_labels)

    def take(self) -> dict[str, float]:
        """{train_NAME: value} since the last line, which this is. Collective, where there are metrics."""
        if not self._metrics:
            return {}
        found = self._states.values(self._world, self._num)
        del found[PREFIX + LOSS]  # that of the last step alone is logged
        self._begin()
        return found

    def before_save(self, run: Run) -> None:
        """See `Callback.before_save`."""
        if self._metrics:
            self._states.to_first(self._world, self._num)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        if not 0 < self._num <= MAX_MICRO_BATCHES:
            return {}
        return {"training_metrics": {"num": self._num, "kept": self._states.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        if self._metrics and (found := state.get("training_metrics")) is not None:
            self._num = found["num"]
            if self._world.rank == 0:
                self._states.load_state_dict(found["kept"], self._world.device)
