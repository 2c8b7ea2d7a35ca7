"""The metrics that there are, and how one of one's own is made."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from zerotrain.data.fetch import is_counted
from zerotrain.training.callback import Callback

States = Sequence[torch.Tensor]
"""The numbers that a metric keeps of one micro-batch."""
OF_VALIDATION, OF_TRAINING = "validation", "training"
"""Kinds of micro-batches that a metric may measure."""
MERGED_BY = {
    "dim_zero_sum": lambda states: sum(states[1:], start=states[0]),
    "dim_zero_max": lambda states: torch.stack(states).amax(dim=0),
    "dim_zero_min": lambda states: torch.stack(states).amin(dim=0),
    "dim_zero_cat": torch.cat,
}
"""torchmetrics' reductions that come to the same digits however the micro-batches are split over the ranks."""


class Metric(Callback):
    """A number of each evaluation, val_NAME, where it is called callbacks.NAME, or of training, train_NAME.

    Each micro-batch is measured apart, on the rank that has it; all ranks merge what came of them in the order of the
    micro-batches. So the digits are those of one process that measures them one after the other.

    Args:
        of: `OF_VALIDATION` (each evaluation), `OF_TRAINING` (the micro-batches that were trained on since the last
            line of train_loss), or both.
        target: the part of a batch that outputs are compared with, by its name, with dots where it lies within
            another: "features.y". None: `labels`, or the second part of a batch without names.
        class_dim: the dimension of the outputs with the classes, 1 or -1 (the last). None: the one for which the sizes
            of outputs and labels agree.

    Raises:
        ValueError: `of` has something else, or nothing; or `class_dim` is another.
    """

    of: Sequence[str] = (OF_VALIDATION,)
    """As the argument, also where a constructor of one's own has none; so are the next two."""
    target: str | None = None
    class_dim: int | None = None

    higher_is_better: bool = True
    """Which way `checkpoint.best` and early stopping prefer it."""
    needs_outputs: ClassVar[bool] = True
    """Whether it looks at the model's outputs: an evaluation then runs each micro-batch once more, without labels."""
    needs_labels: ClassVar[bool] = False
    """Whether a batch without labels is refused."""

    def __init__(
        self, *, of: Sequence[str] = (OF_VALIDATION,), target: str | None = None, class_dim: int | None = None
    ) -> None:
        if not isinstance(of, list | tuple) or not of or not {*map(str, of)} <= {OF_VALIDATION, OF_TRAINING}:
            raise ValueError(f"of: got {of}; it must be a list of {OF_VALIDATION}, {OF_TRAINING} or both")
        if class_dim not in (None, 1, -1):
            raise ValueError(f"class_dim: got {class_dim}; it must be 1, -1 or null")
        self.of, self.target, self.class_dim = tuple(of), target, class_dim

    def measure(self, outputs: Any, labels: torch.Tensor | None) -> States:
        """The numbers to keep of one micro-batch. Outputs and labels come as (N, classes) and (N,), without ignored
        labels, where labels are whole numbers and outputs have one dimension more, the last, with the classes. With the
        classes in dimension 1 they come as they are: (N, classes, ...) and (N, ...)."""
        raise NotImplementedError

    @abstractmethod
    def value(self, loss: float, kept: Sequence[States]) -> float:
        """The metric, of the mean loss and what `measure` gave for each micro-batch, in order; of none where no label
        counts."""


class Perplexity(Metric):
    """The exponential of the mean loss in nats."""

    higher_is_better = False
    needs_outputs = False

    def value(self, loss: float, kept: Sequence[States]) -> float:
        """See `Metric.value`."""
        try:
            return math.exp(loss)
        except OverflowError:
            return math.inf


class Accuracy(Metric):
    """The share of labels whose class the model finds likeliest, 0 to 1."""

    needs_labels = True

    def measure(self, outputs: Any, labels: torch.Tensor | None) -> States:
        """See `Metric.measure`."""
        if labels is None or not isinstance(outputs, torch.Tensor) or class_dims(outputs, labels)[:1] != [1]:
            raise ValueError("accuracy needs labels, and outputs with the classes in one more dimension, 1 or the last")
        counts = is_counted(labels)
        return ((outputs.argmax(dim=1) == labels) & counts).sum(), counts.sum()

    def value(self, loss: float, kept: Sequence[States]) -> float:
        """See `Metric.value`."""
        total = sum(int(count) for _, count in kept)
        return sum(int(right) for right, _ in kept) / total if total else math.nan


class TorchMetric(Metric):
    """A metric with the interface of torchmetrics (extra metrics).

    Args:
        metric: has `update(preds, target)`, `compute()` and `reset()`, and states made by `add_state` that are summed,
            concatenated, or of which the largest or the smallest counts.
        higher_is_better: None: as the metric says.
        of, target, class_dim: see `Metric`.

    Raises:
        ValueError: a state is reduced otherwise, or the metric does not say which way is better.
    """

    needs_labels = True

    def __init__(
        self,
        metric: Any,
        *,
        higher_is_better: bool | None = None,
        of: Sequence[str] = (OF_VALIDATION,),
        target: str | None = None,
        class_dim: int | None = None,
    ) -> None:
        super().__init__(of=of, target=target, class_dim=class_dim)
        name = type(metric).__name__
        if not all(hasattr(metric, each) for each in ("update", "compute", "reset", "_defaults", "_reductions")):
            raise ValueError(f"metric: {name} has not the interface of torchmetrics.Metric")
        better = getattr(metric, "higher_is_better", None) if higher_is_better is None else higher_is_better
        if better is None:
            raise ValueError(f"metric: {name} does not say whether higher is better; give higher_is_better")
        for state, reduction in metric._reductions.items():
            default = metric._defaults[state]
            is_started = isinstance(default, torch.Tensor) and bool((default != 0).any())
            kind = getattr(reduction, "__name__", "nothing")
            if kind not in MERGED_BY or (kind == "dim_zero_sum" and is_started):
                allowed = "sum from 0, max, min or cat"
                raise ValueError(f"metric: {name} reduces its state {state} by {kind}; it must be {allowed}")
        metric.sync_on_compute = metric._to_sync = False  # `compute` gets the states of all ranks
        self._metric, self.higher_is_better = metric, bool(better)

    def measure(self, outputs: Any, labels: torch.Tensor | None) -> States:
        """See `Metric.measure`."""
        if isinstance(outputs, torch.Tensor) and hasattr(self._metric, "to"):
            self._metric.to(outputs.device)
        self._metric.reset()
        self._metric.update(outputs, labels)
        states = (getattr(self._metric, name) for name in self._metric._reductions)
        return [_joined(each) if isinstance(each, list) else each for each in states]

    def value(self, loss: float, kept: Sequence[States]) -> float:
        """See `Metric.value`."""
        if not kept:
            return math.nan
        self._metric.reset()
        for (name, reduction), states in zip(self._metric._reductions.items(), zip(*kept, strict=True), strict=True):
            if isinstance(self._metric._defaults[name], list):
                setattr(self._metric, name, [each for each in states if each.numel()])
            else:
                setattr(self._metric, name, MERGED_BY[reduction.__name__](list(states)))
        self._metric._update_count = len(kept)
        return float(self._metric.compute())


def class_dims(outputs: torch.Tensor, labels: torch.Tensor) -> list[int]:
    """The dimensions of outputs that may be that of the classes, by their sizes and those of the labels: 1, the last,
    both or none."""
    dims = sorted({1, outputs.dim() - 1}) if labels.dim() and outputs.dim() == labels.dim() + 1 else []
    return [dim for dim in dims if outputs.shape[:dim] + outputs.shape[dim + 1 :] == labels.shape]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all, as torchmetrics joins them; an empty one of none."""
    return torch.cat([torch.atleast_1d(each) for each in values]) if values else torch.zeros(0)


def metrics_in(callbacks: Mapping[str, object], of: str) -> dict[str, Metric]:
    """The metrics of validation or of training among the callbacks of a run, by name."""
    return {name: each for name, each in callbacks.items() if isinstance(each, Metric) and of in each.of}


def rising(callbacks: Mapping[str, Callback]) -> frozenset[str]:
    """The names in an evaluation of those metrics of which higher is better."""
    return frozenset(
        f"val_{name}" for name, each in metrics_in(callbacks, OF_VALIDATION).items() if each.higher_is_better
    )
