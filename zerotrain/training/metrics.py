"""Numbers of an evaluation beside its loss, such as accuracy: the same digits on any number of ranks."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from zerotrain.comm.ranks.world import World
from zerotrain.data.reading.batches import IGNORED_LABEL
from zerotrain.errors import CallbackError
from zerotrain.files.printable import printable
from zerotrain.training.callback import Callback

States = Sequence[torch.Tensor]
"""The numbers that a metric keeps of one micro-batch."""
NUM_DIMENSIONS = 8
"""Dimensions that a state may have."""
DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
"""Those that a state may have."""
MERGED_BY = {
    "dim_zero_sum": lambda states: sum(states[1:], start=states[0]),
    "dim_zero_max": lambda states: torch.stack(states).amax(dim=0),
    "dim_zero_min": lambda states: torch.stack(states).amin(dim=0),
    "dim_zero_cat": torch.cat,
}
"""torchmetrics' reductions that come to the same digits however the micro-batches are split over the ranks."""


class Metric(Callback):
    """A number of each evaluation, val_NAME, where it is called callbacks.NAME.

    Each micro-batch is measured apart, on the rank that has it; all ranks merge what came of them in the order of the
    micro-batches. So the digits are those of one process that measures them one after the other.
    """

    higher_is_better: bool = True
    """Which way `checkpoint.best` and early stopping prefer it."""
    needs_outputs: ClassVar[bool] = True
    """Whether it looks at the model's outputs, for which each micro-batch runs a forward without labels."""

    def measure(self, outputs: Any, labels: torch.Tensor | None) -> States:
        """The numbers to keep of one micro-batch. Where outputs have one dimension more than whole-numbered labels,
        classes in the last one, they come as (N, classes) and (N,), without ignored labels."""
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

    def measure(self, outputs: Any, labels: torch.Tensor | None) -> States:
        """See `Metric.measure`."""
        if labels is None or not isinstance(outputs, torch.Tensor) or outputs.shape[:-1] != labels.shape:
            raise ValueError("accuracy needs labels, and outputs with the classes in one more dimension, the last")
        right = (outputs.argmax(dim=-1) == labels).sum()
        return right, torch.full_like(right, labels.numel())

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

    Raises:
        ValueError: a state is reduced otherwise, or the metric does not say which way is better.
    """

    def __init__(self, metric: Any, *, higher_is_better: bool | None = None) -> None:
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


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all, as torchmetrics joins them; an empty one of none."""
    return torch.cat([torch.atleast_1d(each) for each in values]) if values else torch.zeros(0)


class MetricStates:
    """The metrics of one evaluation, by name, and what they measured on this rank."""

    def __init__(self, metrics: Mapping[str, Metric], step: int) -> None:
        self._metrics, self._step = metrics, step
        self._kept: dict[str, dict[int, States]] = {
            name: {} for name, metric in metrics.items() if metric.needs_outputs
        }
        """By name, and by the number of the micro-batch."""

    @property
    def needs_outputs(self) -> bool:
        """Whether the model is to be called for its outputs."""
        return bool(self._kept)

    def add(self, number: int, outputs: Any, labels: torch.Tensor | None) -> None:
        """Measure a micro-batch in which a label counts."""
        outputs, labels = predictions(outputs, labels)
        for name, kept in self._kept.items():
            with self._named(name):
                kept[number] = self._metrics[name].measure(outputs, labels)
                require_states(kept[number])

    def values(self, world: World, loss: float, num_micro_batches: int) -> dict[str, float]:
        """All metrics, as {val_NAME: value}. Collective."""
        found = {}
        for name, metric in self._metrics.items():
            kept = gathered(world, self._kept[name], num_micro_batches) if name in self._kept else []
            with self._named(name):
                found[f"val_{name}"] = metric.value(loss, kept)
        return found

    @contextmanager
    def _named(self, metric: str) -> Iterator[None]:
        """Inside, what a metric raises says whose it is."""
        try:
            yield
        except Exception as error:
            cause = printable(f"{type(error).__name__}: {error}")
            raise CallbackError(f"callbacks.{metric}: evaluation after step {self._step}: {cause}") from error


def metrics_in(callbacks: Mapping[str, Callback]) -> dict[str, Metric]:
    """The metrics among the callbacks of a run, by name."""
    return {name: each for name, each in callbacks.items() if isinstance(each, Metric)}


def rising(callbacks: Mapping[str, Callback]) -> frozenset[str]:
    """The names in an evaluation of those metrics of which higher is better."""
    return frozenset(f"val_{name}" for name, each in metrics_in(callbacks).items() if each.higher_is_better)


def predictions(outputs: Any, labels: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """(outputs, labels) of a micro-batch as `Metric.measure` takes them. Of an output with several parts the logits
    count, or else the first."""
    if not isinstance(outputs, torch.Tensor):
        found = getattr(outputs, "logits", None)
        if found is None and isinstance(outputs, Mapping):
            found = outputs.get("logits")
        if found is None and isinstance(outputs, tuple | list) and outputs:
            found = outputs[0]
        outputs = outputs if found is None else found
    is_of_classes = labels is not None and not labels.is_floating_point() and isinstance(outputs, torch.Tensor)
    if is_of_classes and labels is not None and outputs.shape[:-1] == labels.shape:
        counts = labels != IGNORED_LABEL
        return outputs[counts], labels[counts]
    return outputs, labels


def require_states(states: States) -> None:
    """Make sure that states can be sent to other ranks; ValueError where one cannot."""
    for each in states:
        if each.dtype not in DTYPES or each.dim() > NUM_DIMENSIONS:
            raise ValueError(
                f"it keeps a {each.dim()}-dimensional tensor of {each.dtype}; it must be of real numbers with at most "
                f"{NUM_DIMENSIONS} dimensions"
            )


def gathered(world: World, mine: Mapping[int, States], num_micro_batches: int) -> list[States]:
    """The states of all micro-batches in their order, on every rank: of those that no rank measured none. Collective.

    Args:
        mine: by the number of the micro-batch, on this rank's device. Each has the same number of states.
    """
    counts = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    counts[world.rank] = max(map(len, mine.values()), default=0)
    num_states = int(world.sum(counts).max())
    shapes = torch.zeros(num_micro_batches, num_states, 2 + NUM_DIMENSIONS, dtype=torch.int64)
    for number, states in mine.items():
        for place, state in enumerate(states):
            about = (1 + DTYPES.index(state.dtype), state.dim(), *state.shape)
            shapes[number, place, : len(about)] = torch.tensor(about)
    told: list[list[list[int]]] = world.sum(shapes.to(world.device)).tolist()
    parts = []
    for number, of_states in enumerate(told):
        for place, (_, num_dimensions, *shape) in enumerate(of_states):
            own = _bits(mine[number][place]).flatten() if number in mine else None
            size = math.prod(shape[:num_dimensions])
            parts.append(torch.zeros(size, dtype=torch.int64, device=world.device) if own is None else own)
    values = iter(world.sum(torch.cat(parts)).split([len(each) for each in parts]) if parts else ())
    found: list[States] = []
    for of_states in told:
        states = [
            _of_bits(next(values), DTYPES[dtype - 1]).view(shape[:num_dimensions])
            for dtype, num_dimensions, *shape in of_states
        ]
        if of_states and of_states[0][0]:
            found.append(states)
    return found


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same values as int64, those of floats by their bits in fp64: a sum with zeros changes none."""
    return values.double().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def _of_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.view(torch.float64) if dtype.is_floating_point else values).to(dtype)
