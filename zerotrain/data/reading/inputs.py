"""The parts of a micro-batch: any structure of tensors, of which some may be labels."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerotrain.data.reading.batches import IGNORED_LABEL

LABELS = "labels"
WITH_OUTPUTS = "with_outputs"
"""The argument of a model's forward that asks for (loss, outputs)."""
IDS = ("ids", "input_ids")
"""Names of a language model's inputs in a batch; without names they stand first."""


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


def without_labels(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The model's arguments but for the labels, which come from what `labels_of` gives."""
    inputs, labels = as_inputs(batch), labels_of(batch)
    if isinstance(inputs, Mapping):
        return {name: value for name, value in inputs.items() if name != LABELS}
    return [each for each in inputs if labels is None or each is not labels]


def num_labels(batch: Any, num_rows: int) -> int:
    """The weight of a micro-batch in the loss of a step: its labels that count, or its rows if there are no labels.
    Call it before the batch is copied to a GPU: there it would wait for the device.
    """
    labels = labels_of(batch)
    return num_rows if labels is None else int((labels != IGNORED_LABEL).sum())


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


def _fields(batch: Any) -> dict[str, Any] | None:
    """Those of a dataclass."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return None
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
