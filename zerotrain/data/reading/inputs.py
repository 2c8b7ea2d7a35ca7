"""The parts of a micro-batch: any structure of tensors, of which some may be labels; and what it weighs in a step."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zerotrain.data.reading.batches import IGNORED_LABEL

LABELS = "labels"
WITH_OUTPUTS = "with_outputs"
"""The argument of a model's forward that asks for (loss, outputs)."""
IDS = ("ids", "input_ids")
"""Names of a language model's inputs in a batch; without names they stand first."""
LOSS_COUNT = "loss_count"
"""The method of a model that says what its mean loss divides by: it gets a batch as the forward does."""
AUTO, MODEL = "auto", "model"
"""`train.loss_over`: a model's own count where it has one, else `num_labels`; and that count alone."""
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_GRID = 2**30
"""A weight that is no whole number is rounded to a part of 1 of this size: sums of such weights over the ranks of a run
are exact, so that they have the same bits in any order."""
Weigh = Callable[[Any, int], float]
"""What a micro-batch weighs in the mean loss of a step, of (batch, its number of rows)."""


def as_inputs(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The model's arguments, as `ZeroEngine.train_step` takes them: a dict or a dataclass gives named arguments,
    a tuple or list positional ones, a named tuple too, and anything else is the only one."""
    if (fields := _fields(batch)) is not None:
        return fields
    return batch if isinstance(batch, Mapping | tuple | list) else (batch,)


def ids_of(batch: Any) -> torch.Tensor | None:
    """The tokens a language model is given: what is called `ids` or `input_ids`, or else what stands first."""
    inputs = as_inputs(batch)
    if isinstance(inputs, Mapping):
        found = next((inputs[name] for name in IDS if name in inputs), None)
    else:
        found = inputs[0] if inputs else None
    return found if isinstance(found, torch.Tensor) else None


def num_tokens_of(batch: Any) -> int:
    """Tokens in the rows of a micro-batch, with their padding; 0 where they are of something else. It looks at shapes
    alone, so it may be asked of a batch on any device."""
    ids = ids_of(batch)
    is_of_tokens = ids is not None and ids.ndim == 2 and ids.dtype in (torch.int32, torch.int64)
    return ids.numel() if ids is not None and is_of_tokens else 0


def tokens_known(model: Any) -> int | None:
    """How many tokens a language model knows; None of a model that is none, or does not say."""
    known = getattr(model, "vocab_size", None)
    return known if getattr(model, "next_token_labels", False) and isinstance(known, int) else None


def unknown_token(batch: Any, vocab_size: int) -> tuple[int, int] | None:
    """(the number of its item, the token) of one that a language model does not know, of a batch of rows of tokens;
    None where it knows all."""
    for part, may_be_ignored in ((ids_of(batch), False), (labels_of(batch), True)):
        if part is None or part.dtype not in (torch.int32, torch.int64) or not part.ndim or not part.numel():
            continue
        outside = (part < 0) | (part >= vocab_size)
        places = (outside & (part != IGNORED_LABEL) if may_be_ignored else outside).nonzero()
        if len(places):
            return int(places[0][0]), int(part[tuple(places[0])])
    return None


def labels_of(batch: Any) -> torch.Tensor | None:
    """The labels of a micro-batch: what is called `labels`, or else what stands in the second place; None where there
    is no tensor."""
    inputs = as_inputs(batch)
    if isinstance(inputs, Mapping):
        found = inputs.get(LABELS)
    else:
        found = getattr(inputs, LABELS, inputs[1] if len(inputs) > 1 else None)
    return found if isinstance(found, torch.Tensor) else None


def target_of(batch: Any, path: str | None) -> torch.Tensor | None:
    """What a metric compares outputs with: the part of a batch that a dotted path of names leads to, such as
    "features.y", or `labels_of` without a path; None where there is no tensor."""
    if path is None:
        return labels_of(batch)
    found = batch
    for name in path.split("."):
        found = names_in(found).get(name)
    return found if isinstance(found, torch.Tensor) else None


def names_in(value: Any) -> Mapping[str, Any]:
    """The parts that have names, of a dict, a dataclass or a named tuple."""
    if (fields := _fields(value)) is not None:
        return fields
    return value if isinstance(value, Mapping) else value._asdict() if hasattr(value, "_fields") else {}


def without_targets(batch: Any, paths: Iterable[str | None]) -> Sequence[Any] | Mapping[str, Any]:
    """The model's arguments but for what `target_of` gives for each path."""
    inputs, wanted = as_inputs(batch), [path or LABELS for path in paths]
    if isinstance(inputs, Mapping):
        for path in wanted:
            inputs = _without(inputs, path.split("."))
        return inputs
    names = getattr(inputs, "_fields", ())
    left_out = {names.index(path) if path in names else 1 for path in wanted}
    return [part for place, part in enumerate(inputs) if place not in left_out or not isinstance(part, torch.Tensor)]


def _without(named: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    first, *rest = path
    if rest and isinstance(inner := named.get(first), Mapping):
        return {**named, first: _without(inner, rest)}
    return {name: value for name, value in named.items() if rest or name != first}


def is_signed(labels: torch.Tensor) -> bool:
    """Whether labels are signed whole numbers, of which -100 means ignored; in others it is a label, or cannot be."""
    return labels.dtype in _SIGNED


def is_counted(labels: torch.Tensor) -> torch.Tensor:
    """Which labels are not ignored; bool, of the same shape."""
    return labels != IGNORED_LABEL if is_signed(labels) else torch.ones_like(labels, dtype=torch.bool)


def count_labels(labels: torch.Tensor) -> int:
    """The labels that are not ignored. It waits for a GPU that has them."""
    return int(is_counted(labels).sum()) if is_signed(labels) else labels.numel()


def num_labels(batch: Any, num_rows: int) -> int:
    """The labels of a micro-batch that count, or its rows where labels are no signed whole numbers, or there are none.
    Call it before the batch is copied to a GPU: there it would wait for the device.
    """
    labels = labels_of(batch)
    return num_rows if labels is None or not is_signed(labels) else count_labels(labels)


def _labels_from(first: int, batch: Any, num_rows: int) -> int:
    """The labels that count of each row, from one on."""
    labels = labels_of(batch)
    return num_rows if labels is None else count_labels(labels[:, first:] if labels.dim() > 1 else labels)


WEIGHTS: dict[str, Weigh] = {
    AUTO: num_labels,
    "labels": partial(_labels_from, 0),
    "shifted_labels": partial(_labels_from, 1),
    "rows": lambda _, num_rows: num_rows,
    "micro_batches": lambda *_: 1,
}
"""By `train.loss_over`. Call them before a batch is copied to a GPU."""


def weighing_of(loss_over: str, model: Any) -> tuple[str, Weigh]:
    """(the name of what is counted, the function that does it) for a setting and a model.

    Raises:
        ValueError: the model is to count, and cannot.
    """
    count = getattr(model, LOSS_COUNT, None)
    if loss_over != MODEL and (loss_over != AUTO or not callable(count)):
        return loss_over, WEIGHTS[loss_over]
    if not callable(count):
        kind = type(model).__name__
        raise ValueError(
            f"{kind} has no method {LOSS_COUNT}, which gets a batch as {kind}.forward does and returns what the mean "
            f"loss divides by; the others are {', '.join(WEIGHTS)}"
        )
    return MODEL, partial(_count_of_model, count)


def _count_of_model(count: Callable[..., Any], batch: Any, _: int) -> float:
    inputs = as_inputs(batch)
    counted = float(count(**inputs) if isinstance(inputs, Mapping) else count(*inputs))
    if not 0 <= counted < math.inf:
        raise ValueError(f"{LOSS_COUNT} returned {counted} for a batch; it must be a number from 0 on")
    return round(counted * _GRID) / _GRID


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The same batch with its tensors on a device. A mapping of whatever class comes out as a dict."""
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with another tensor in the place of each. A mapping of whatever class comes out as a dict."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: with_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [with_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if (fields := _fields(batch)) is not None:
        return dataclasses.replace(batch, **with_tensors(fields, change))
    return batch


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch."""
    found: list[torch.Tensor] = []
    with_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _fields(batch: Any) -> dict[str, Any] | None:
    """Those of a dataclass."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return None
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
