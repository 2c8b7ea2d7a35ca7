"""The metrics, the base class for one of your own, and the states exchanged between ranks."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, TypedDict

import torch
from msgspec import Meta

from zerotrain.comm.collectives import Collectives
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.fetch import count_labels, is_counted, is_signed, target_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CallbackError
from zerotrain.files.untrusted import MAX_INT, Natural, is_kind, printable
from zerotrain.training.callback import Callback, Run

States = Sequence[torch.Tensor]
"""The numbers of a metric for one micro-batch."""
OF_VALIDATION, OF_TRAINING = "validation", "training"
"""Kinds of micro-batches for a metric."""
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
    """The direction for `checkpoint.best` and early stopping."""
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
    """The share of labels predicted as the likeliest class, 0 to 1."""

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
        if not all(hasattr(metric, part) for part in ("update", "compute", "reset", "_defaults", "_reductions")):
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
        states = [getattr(self._metric, name) for name in self._metric._reductions]
        for place, state in enumerate(states):
            if isinstance(state, list):  # joined as torchmetrics does
                states[place] = torch.cat([torch.atleast_1d(part) for part in state]) if state else torch.zeros(0)
        return states

    def value(self, loss: float, kept: Sequence[States]) -> float:
        """See `Metric.value`."""
        if not kept:
            return math.nan
        self._metric.reset()
        for (name, reduction), states in zip(self._metric._reductions.items(), zip(*kept, strict=True), strict=True):
            if isinstance(self._metric._defaults[name], list):
                setattr(self._metric, name, [state for state in states if state.numel()])
            else:
                setattr(self._metric, name, MERGED_BY[reduction.__name__](list(states)))
        self._metric._update_count = len(kept)
        return float(self._metric.compute())


def class_dims(outputs: torch.Tensor, labels: torch.Tensor) -> list[int]:
    """The dimensions of outputs with the sizes of the labels around them, which may have the classes: 1, the last, both
    or none."""
    dims = sorted({1, outputs.dim() - 1}) if labels.dim() and outputs.dim() == labels.dim() + 1 else []
    return [dim for dim in dims if outputs.shape[:dim] + outputs.shape[dim + 1 :] == labels.shape]


def metrics_in(callbacks: Mapping[str, object], kind: str) -> dict[str, Metric]:
    """The metrics of validation or of training among the callbacks of a run, by name."""
    return {name: metric for name, metric in callbacks.items() if isinstance(metric, Metric) and kind in metric.of}


def rising_metrics(callbacks: Mapping[str, Callback]) -> frozenset[str]:
    """The names in an evaluation of metrics; higher is better of these."""
    return frozenset(
        f"val_{name}" for name, metric in metrics_in(callbacks, OF_VALIDATION).items() if metric.higher_is_better
    )


# The states of metrics for each micro-batch, and their exchange between ranks.


NUM_DIMENSIONS = 8
"""Dimensions of a state, at most."""
DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
"""The dtypes of states."""
LOSS = "loss"
MAX_TOLD = 2**16
"""Numbers of one metric in a checkpoint, at most."""


SavedState = tuple[
    Annotated[int, Meta(ge=0, lt=len(DTYPES))],
    Annotated[list[Natural], Meta(max_length=NUM_DIMENSIONS)],
    list[Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]],
]
"""A state in a checkpoint: the place of its dtype among `DTYPES`, its shape, and its values as int64."""


class _SavedMetrics(TypedDict):
    num: Natural
    kept: dict[str, dict[Natural, list[SavedState]]]


class MetricStates:
    """The loss and the metrics of some micro-batches, by name, and what they measured on this rank.

    Args:
        prefix: of their names, such as "val_".
        where: for messages: "evaluation after step 3".
        model: whose outputs they are; a language model has its classes in the last dimension.
        adds_up: whether losses are sums, to be added up.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], prefix: str, where: str, model: Any = None, *, adds_up: bool = False
    ) -> None:
        self._metrics, self._prefix, self.where, self._adds_up = metrics, prefix, where, adds_up
        self._class_dim = -1 if getattr(model, "next_token_labels", False) else None
        names = [LOSS, *(name for name, metric in metrics.items() if metric.needs_outputs)]
        self._kept: dict[str, dict[int, States]] = {name: {} for name in names}
        """By name, and by the number of the micro-batch among those of all ranks."""
        self.needs_outputs = len(names) > 1
        """Whether the model is to be called for its outputs."""

    def add(self, number: int, loss: torch.Tensor, weight: float, outputs: Any, batch: Any, num_counted: int) -> None:
        """Measure a micro-batch, unless it weighs nothing: then its mean loss is nan in many models. The device is not
        waited for, if no metric does so and none names its target.

        Args:
            loss: the mean, 0-dim.
            weight: of the loss.
            outputs: of the model, if `needs_outputs`.
            num_counted: labels of the batch that count, as this process knows.
        """
        if not weight:
            return
        loss = loss.double()
        self._kept[LOSS][number] = [torch.stack([loss * weight, torch.full_like(loss, weight)])]
        for name, by_number in self._kept.items():
            if name == LOSS:
                continue
            metric, labels = self._metrics[name], target_of(batch, self._metrics[name].target)
            count = num_counted if metric.target is None else None
            with self._errors_of(name):
                measured = predictions(outputs, labels, count, metric.class_dim or self._class_dim)
                by_number[number] = metric.measure(*measured)
                require_states(by_number[number])

    def values(self, collectives: Collectives) -> dict[str, float]:
        """The mean loss over all labels and all metrics, by their names with the prefix. Collective.

        The loss is added up in the order of the micro-batches: the sums of each rank, added up, would be other bits at
        another number of ranks. It is nan where no label counts.
        """
        states = {name: [*by_number.values()] for name, by_number in self._gather(collectives).items()}
        loss_sum, total = 0.0, 0.0
        for [of_one] in states[LOSS]:
            loss_sum, total = loss_sum + of_one[0].item(), total + of_one[1].item()
        mean = loss_sum / (1.0 if self._adds_up else total) if total else math.nan
        values = {f"{self._prefix}{LOSS}": mean}
        for name, metric in self._metrics.items():
            with self._errors_of(name):
                values[f"{self._prefix}{name}"] = metric.value(mean, states.get(name, ()))
        return values

    def to_first(self, collectives: Collectives) -> None:
        """Let rank 0 have what all ranks have measured, as if it had done so alone. Collective."""
        of_all = self._gather(collectives)
        self._kept = of_all if collectives.world.rank == 0 else {name: {} for name in self._kept}

    def _gather(self, collectives: Collectives) -> dict[str, dict[int, States]]:
        """The states of all ranks' micro-batches by name and number, in order, on every rank. Collective."""
        own = {name: _pack(by_number) for name, by_number in self._kept.items()}
        by_rank, device = collectives.gather_objects(own, name="metrics"), collectives.world.device
        gathered: dict[str, dict[int, States]] = {}
        for name in own:
            by_number: dict[int, States] = {}
            for layouts, values in (of_rank[name] for of_rank in by_rank):
                sizes = [math.prod(shape) for layout in layouts.values() for _, *shape in layout]
                parts = iter(values.to(device).split(sizes) if sizes else ())
                for number, layout in layouts.items():
                    by_number[number] = [_of_bits(next(parts), DTYPES[dtype]).view(shape) for dtype, *shape in layout]
            gathered[name] = dict(sorted(by_number.items()))
        return gathered

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank, as values that JSON can hold. A metric that keeps many numbers is left out."""
        return {
            name: {str(number): [_write_state(state) for state in states] for number, states in by_number.items()}
            for name, by_number in self._kept.items()
            if sum(state.numel() for states in by_number.values() for state in states) <= MAX_TOLD
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Have what `state_dict` gave, of those metrics that there are."""
        for name in self._kept.keys() & state.keys():
            self._kept[name] = {
                int(number): [
                    _of_bits(torch.tensor(bits, dtype=torch.int64, device=device), DTYPES[dtype]).view(shape)
                    for dtype, shape, bits in states
                ]
                for number, states in state[name].items()
            }

    @contextmanager
    def _errors_of(self, metric: str) -> Iterator[None]:
        """Inside, an error of a metric names it."""
        try:
            yield
        except Exception as error:
            cause = printable(f"{type(error).__name__}: {error}")
            raise CallbackError(f"callbacks.{metric}: {self.where}: {cause}") from error


def predictions(
    outputs: Any, labels: torch.Tensor | None, num_counted: int | None = None, class_dim: int | None = None
) -> tuple[Any, torch.Tensor | None]:
    """(outputs, labels) of a micro-batch as `Metric.measure` takes them.

    Args:
        num_counted: signed labels that are not ignored; None: the device is asked.
        class_dim: see `Metric`.

    Raises:
        ValueError: the classes may be in two dimensions.
    """
    outputs = logits_in(outputs)
    dim = class_dim_of(outputs, labels, class_dim)
    if labels is None or dim is None or dim < outputs.dim() - 1:
        return outputs, labels
    outputs, labels = outputs.flatten(0, -2), labels.flatten()
    num_counted = count_labels(labels) if num_counted is None or not is_signed(labels) else num_counted
    if num_counted == len(labels):
        return outputs, labels
    # An index by a mask waits for the device, which alone knows how many there are. These are in the same order.
    places = (~is_counted(labels)).to(torch.uint8).argsort(stable=True)[:num_counted]
    return outputs[places], labels[places]


def logits_in(outputs: Any) -> Any:
    """The logits of an output with several parts, or else the first."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    if logits is None and isinstance(outputs, tuple | list) and outputs:
        logits = outputs[0]
    return outputs if logits is None else logits


def class_dim_of(outputs: Any, labels: torch.Tensor | None, class_dim: int | None) -> int | None:
    """The dimension of the classes where labels are whole numbers: the one given, if the sizes allow it, or the one
    that they tell; None where there is none.

    Raises:
        ValueError: it may be dimension 1 or the last.
    """
    if labels is None or labels.is_floating_point() or not isinstance(outputs, torch.Tensor):
        return None
    dims = class_dims(outputs, labels)
    if len(dims) > 1 and class_dim is None:
        raise ValueError(
            f"the classes of outputs of shape {tuple(outputs.shape)} may be in dimension 1 or in the last, by labels "
            f"of shape {tuple(labels.shape)}; give class_dim=1 or class_dim=-1"
        )
    return next(iter(dims[::-1] if class_dim == -1 else dims), None)


def require_states(states: States) -> None:
    """Refuse states that no checkpoint can hold, with a ValueError."""
    for state in states:
        if state.dtype not in DTYPES or state.dim() > NUM_DIMENSIONS:
            raise ValueError(
                f"it keeps a {state.dim()}-dimensional tensor of {state.dtype}; it must be of real numbers with at "
                f"most {NUM_DIMENSIONS} dimensions"
            )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same values as int64, those of floats by their bits in fp64."""
    return values.double().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def _of_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.view(torch.float64) if dtype.is_floating_point else values).to(dtype)


def _pack(by_number: Mapping[int, States]) -> tuple[dict[int, list[list[int]]], torch.Tensor]:
    """States as they are sent to other ranks: the dtype (its place among `DTYPES`) and the shape of each, by the number
    of the micro-batch; and the values of all as int64 in one tensor, since thousands of small ones are slow to read."""
    layouts = {
        number: [[DTYPES.index(state.dtype), *state.shape] for state in states] for number, states in by_number.items()
    }
    values = [_bits(state).flatten() for states in by_number.values() for state in states]
    return layouts, torch.cat(values).cpu() if values else torch.zeros(0, dtype=torch.int64)


def _write_state(state: torch.Tensor) -> list[Any]:
    return [DTYPES.index(state.dtype), list(state.shape), _bits(state).flatten().tolist()]


def is_metrics_state(value: Any) -> bool:
    """Whether a value out of a file has the form of {"num": how many micro-batches, "kept": `state_dict()`}."""
    if not is_kind(value, _SavedMetrics):
        return False
    for name, by_number in value["kept"].items():
        for number, states in by_number.items():
            shapes = [shape for _, shape, _ in states]
            are_whole = all(math.prod(shape) == len(bits) for _, shape, bits in states)
            if not are_whole or int(number) >= value["num"] or (name == LOSS and shapes != [[2]]):
                return False
    return True


# Metrics of the steps of a run, from the forwards in training.


PREFIX = "train_"


class TrainingMetrics(Callback):
    """The metrics of all micro-batches that were trained on since the last line, as one process would measure them. A
    step in which no line is due sends nothing for them and waits for nothing.

    Args:
        callbacks: of the user, by name, the metrics among them.
        sampler: of the run's training.
    """

    def __init__(self, callbacks: Mapping[str, Callback], engine: ZeroEngine, sampler: GlobalBatchSampler) -> None:
        self._metrics, self._engine, self._sampler = metrics_in(callbacks, OF_TRAINING), engine, sampler
        self._begin()

    def _begin(self) -> None:
        self._states = MetricStates(self._metrics, PREFIX, "training", self._engine.module)
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
        num_micro_batches = self._sampler.num_virtual_ranks * self._sampler.num_micro_batches
        self._num_before, self._num = self._num, self._num + num_micro_batches
        measured = iter(zip(micro_batches, *counts, strict=True))
        return {"after_each": partial(self._measure, measured), "with_outputs": self._states.needs_outputs}

    def _measure(self, measured: Any, virtual_rank: int, index: int, loss: torch.Tensor, outputs: Any) -> None:
        """The next of this rank's micro-batches has had its forward."""
        batch, weight, num_labels = next(measured)
        number = self._num_before + index * self._sampler.num_virtual_ranks + virtual_rank
        self._states.add(number, loss, weight, outputs, batch, num_labels)

    def take(self) -> dict[str, float]:
        """{train_NAME: value} since the last line, which this is. Collective, where there are metrics."""
        if not self._metrics:
            return {}
        values = self._states.values(self._engine.collectives)
        del values[PREFIX + LOSS]  # that of the last step alone is logged
        self._begin()
        return values

    def before_save(self, run: Run) -> None:
        """See `Callback.before_save`."""
        if self._metrics:
            self._states.to_first(self._engine.collectives)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        if not self._num:
            return {}
        return {"training_metrics": {"num": self._num, "kept": self._states.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        if self._metrics and (saved := state.get("training_metrics")) is not None:
            self._num = saved["num"]
            if self._engine.world.rank == 0:
                self._states.load_state_dict(saved["kept"], self._engine.world.device)
