"""The states that metrics keep of each micro-batch, and their exchange between ranks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta

from zerotrain.comm.world import World
from zerotrain.data.fetch import count_labels, is_counted, is_signed, target_of
from zerotrain.errors import CallbackError
from zerotrain.files.untrusted import is_kind, printable
from zerotrain.training.metrics.metric import Metric, States, class_dims

NUM_DIMENSIONS = 8
"""Dimensions that a state may have."""
DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
"""Those that a state may have."""
LOSS = "loss"
MAX_TOLD = 2**16
"""Numbers of one metric that a checkpoint keeps at most."""
MAX_MICRO_BATCHES = 2**20


class _Kept(TypedDict):
    num: Annotated[int, Meta(ge=0, le=MAX_MICRO_BATCHES)]
    kept: dict[str, dict[str, list[list[Any]]]]


"""As many are told of in a checkpoint at most."""


class MetricStates:
    """The loss and the metrics of some micro-batches, by name, and what they measured on this rank.

    Args:
        prefix: of their names, such as "val_".
        where: for messages: "evaluation after step 3".
        model: whose outputs they are; a language model has its classes in the last dimension.
    """

    def __init__(self, metrics: Mapping[str, Metric], prefix: str, where: str, model: Any = None) -> None:
        self._metrics, self._prefix, self.where = metrics, prefix, where
        self._class_dim = -1 if getattr(model, "next_token_labels", False) else None
        names = [LOSS, *(name for name, metric in metrics.items() if metric.needs_outputs)]
        self._kept: dict[str, dict[int, States]] = {name: {} for name in names}
        """By name, and by the number of the micro-batch among those of all ranks."""

    @property
    def needs_outputs(self) -> bool:
        """Whether the model is to be called for its outputs."""
        return len(self._kept) > 1

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
        for name, kept in self._kept.items():
            if name == LOSS:
                continue
            metric, labels = self._metrics[name], target_of(batch, self._metrics[name].target)
            known = num_counted if metric.target is None else None
            with self._named(name):
                measured = predictions(outputs, labels, known, metric.class_dim or self._class_dim)
                kept[number] = metric.measure(*measured)
                require_states(kept[number])

    def values(self, world: World, num_micro_batches: int) -> dict[str, float]:
        """The mean loss over all labels and all metrics, by their names with the prefix. Collective.

        The loss is added up in the order of the micro-batches: the sums of each rank, added up, would be other bits at
        another number of ranks. It is nan where no label counts.
        """
        found: dict[str, float] = {}
        kept = {name: list(gathered(world, mine, num_micro_batches).values()) for name, mine in self._kept.items()}
        loss_sum, total = 0.0, 0.0
        for [of_one] in kept[LOSS]:
            loss_sum, total = loss_sum + of_one[0].item(), total + of_one[1].item()
        mean = loss_sum / total if total else math.nan
        found[f"{self._prefix}{LOSS}"] = mean
        for name, metric in self._metrics.items():
            with self._named(name):
                found[f"{self._prefix}{name}"] = metric.value(mean, kept.get(name, ()))
        return found

    def to_first(self, world: World, num_micro_batches: int) -> None:
        """Let rank 0 have what all ranks have measured, as if it had done so alone. Collective."""
        for name, mine in self._kept.items():
            found = gathered(world, mine, num_micro_batches)
            self._kept[name] = found if world.rank == 0 else {}

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank, as values that JSON can hold. A metric that keeps many numbers is left out."""
        return {
            name: {str(number): [_told(state) for state in states] for number, states in kept.items()}
            for name, kept in self._kept.items()
            if sum(state.numel() for states in kept.values() for state in states) <= MAX_TOLD
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Have what `state_dict` gave, of those metrics that there are."""
        for name in self._kept.keys() & state.keys():
            self._kept[name] = {
                int(number): [_of_told(each, device) for each in states] for number, states in state[name].items()
            }

    @contextmanager
    def _named(self, metric: str) -> Iterator[None]:
        """Inside, what a metric raises says whose it is."""
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
    found = getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("logits")
    if found is None and isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    return outputs if found is None else found


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
    """Make sure that states can be sent to other ranks; ValueError where one cannot."""
    for each in states:
        if each.dtype not in DTYPES or each.dim() > NUM_DIMENSIONS:
            raise ValueError(
                f"it keeps a {each.dim()}-dimensional tensor of {each.dtype}; it must be of real numbers with at most "
                f"{NUM_DIMENSIONS} dimensions"
            )


def gathered(world: World, mine: Mapping[int, States], num_micro_batches: int) -> dict[int, States]:
    """The states of all micro-batches by their number, in order, on every rank: of those that no rank measured none.
    Collective.

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
    found: dict[int, States] = {}
    for number, of_states in enumerate(told):
        states = [
            _of_bits(next(values), DTYPES[dtype - 1]).view(shape[:num_dimensions])
            for dtype, num_dimensions, *shape in of_states
        ]
        if of_states and of_states[0][0]:
            found[number] = states
    return found


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same values as int64, those of floats by their bits in fp64: a sum with zeros changes none."""
    return values.double().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def _of_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.view(torch.float64) if dtype.is_floating_point else values).to(dtype)


def _told(state: torch.Tensor) -> list[Any]:
    return [DTYPES.index(state.dtype), list(state.shape), _bits(state).flatten().tolist()]


def _of_told(told: list[Any], device: torch.device) -> torch.Tensor:
    dtype, shape, bits = told
    return _of_bits(torch.tensor(bits, dtype=torch.int64, device=device), DTYPES[dtype]).view(shape)


def are_told(value: Any) -> bool:
    """Whether a value out of a file has the form of {"num": how many micro-batches, "kept": `state_dict()`}."""
    if not is_kind(value, _Kept):
        return False
    try:
        for name, kept in value["kept"].items():
            for number, told in kept.items():
                states = [_of_told(each, torch.device("cpu")) for each in told]
                require_states(states)
                is_loss = [state.shape for state in states] == [(2,)]
                if not 0 <= int(number) < value["num"] or (name == LOSS and not is_loss):
                    return False
    except (ValueError, TypeError, LookupError, RuntimeError):  # whatever torch makes of it
        return False
    return True
