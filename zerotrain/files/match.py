"""The one match of tensors out of files with a model's, by name, shape and dtype, and the sentences about misfits.

Checkpoints, files of weights, state dicts, pretrained models and saved runs go through it. Nothing is read for it.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerotrain.files.untrusted import listed

MAX_NAMES_SHOWN = 10
MAX_NAMES_COMPARED = 2000
"""To find the nearest of more takes seconds."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a source of weights."""

    names: Sequence[str]
    """Several of a tied one; any is enough."""
    kind: str
    """Its dtype, as the format calls it."""
    dtype: torch.dtype | None
    """None for an unreadable tensor, and for one without elements, of which nothing was written."""
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    """Tells the order of its elements there."""
    place: Any = None
    """Its location, in the form of its source."""
    part: str = ""
    """The entry that holds it, if a file holds more than weights: "model" of {"model": ..., "optim": ...}."""


@dataclass(eq=False)
class ModelTensor:
    """A tensor of the model, or a value that a module keeps beside its tensors: that is matched by its name alone."""

    names: list[str]
    """In the order of its modules. Sentences call it by the first."""
    tensor: Any
    stored: list[tuple[str, StoredTensor]] = field(default_factory=list)
    """Tensors that fit it, under which of its names. If a tied one has several, the last is read, as by PyTorch."""


def model_tensors(named: Iterable[tuple[str, Any]]) -> list[ModelTensor]:
    """Each tensor of (name, tensor) pairs once, with all its names in their order."""
    targets: dict[int, ModelTensor] = {}
    for name, tensor in named:
        target = targets.setdefault(id(tensor), ModelTensor([], tensor))
        if name not in target.names:
            target.names.append(name)
    return list(targets.values())


@dataclass(frozen=True)
class Misfits:
    """All that a source and a model do not have alike. Names are the model's, but for `surplus`."""

    missing: tuple[str, ...]
    """Not there, and left as they were."""
    surplus: tuple[str, ...]
    """There, and not in the model."""
    wrong_shape: tuple[str, ...]
    """A sentence for each tensor that was left as it was, since it has another shape there."""
    wrong_dtype: tuple[str, ...]
    """The same of integers for floating-point numbers, and the like."""

    def problems(self, remedy: str = "") -> list[str]:
        """A line for each kind of misfit, and one for each tensor of another shape or kind.

        Args:
            remedy: follows the names that only one of both has.
        """
        problems = []
        if self.missing:
            problems.append(f"it lacks {_listed(self.missing, self.surplus)}{remedy}")
        if self.surplus:
            problems.append(f"the model has no {_listed(self.surplus, self.missing)}{remedy}")
        for sentences, word in ((self.wrong_shape, "shapes"), (self.wrong_dtype, "kinds")):
            problems += sentences[:MAX_NAMES_SHOWN]
            if len(sentences) > MAX_NAMES_SHOWN:
                problems.append(f"and {len(sentences) - MAX_NAMES_SHOWN} more are of other {word}")
        return problems


def kind_of(dtype: torch.dtype | None) -> str:
    """The kind of a dtype: dtypes of one kind are turned into each other. Numbers of 8
    bits are of a kind of their own: they need a scale that nobody knows here."""
    if dtype is None or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"{dtype}"
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "integer"


def any_kind(dtype: torch.dtype | None) -> str:
    """One kind for all dtypes."""
    return ""


def match(
    tensors: Sequence[StoredTensor],
    targets: Sequence[ModelTensor],
    *,
    rename: Callable[[str], str] = str,
    kind: Callable[[torch.dtype | None], str] = kind_of,
) -> Misfits:
    """Give each tensor of a model what fits it, in `stored`.

    Args:
        rename: from names in the source to names in the model.
        kind: what must be the same of two dtypes; `str`: all; `any_kind`: nothing.
    """
    homes = {name: target for target in targets for name in target.names}
    surplus, wrong_shape, wrong_dtype = [], [], []
    matched: set[ModelTensor] = set()
    for tensor in tensors:
        name = next((name for name in map(rename, tensor.names) if name in homes), None)
        if name is None:
            surplus.append(tensor.names[0])
            continue
        home = homes[name]
        shape: tuple[int, ...] = ()
        dtype = None
        if isinstance(home.tensor, torch.Tensor):
            shape, dtype = tuple(home.tensor.shape), home.tensor.dtype
        matched.add(home)
        if tensor.shape != shape:
            wrong_shape.append(f"{name} is of shape {tensor.shape} in it, and of shape {shape} in the model")
        elif 0 not in shape and kind(tensor.dtype) != kind(dtype):
            wrong_dtype.append(f"{name} is {tensor.kind} in it, and {str(dtype).removeprefix('torch.')} in the model")
        else:
            home.stored.append((name, tensor))
    for target in targets:
        target.stored.sort(key=lambda pair: target.names.index(pair[0]))
    return Misfits(
        missing=tuple(target.names[0] for target in targets if target not in matched),
        surplus=tuple(surplus),
        wrong_shape=tuple(wrong_shape),
        wrong_dtype=tuple(wrong_dtype),
    )


def _listed(names: Sequence[str], candidates: Sequence[str]) -> str:
    """Names, each with the one of others that is most like it."""
    texts = list(names)
    for place, name in enumerate(names[:MAX_NAMES_SHOWN]):
        if nearest := difflib.get_close_matches(name, candidates[:MAX_NAMES_COMPARED], n=1):
            texts[place] += f" (is it {nearest[0]}?)"
    return listed(texts, MAX_NAMES_SHOWN)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions that have a length, from the slowest to the fastest."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    return sorted(dims, key=lambda dim: -stride[dim])


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor with its elements in the order of its dimensions."""
    stride = [1]
    for length in shape[:0:-1]:
        stride.append(stride[-1] * max(1, length))
    return tuple(stride[::-1]) if len(shape) else ()
