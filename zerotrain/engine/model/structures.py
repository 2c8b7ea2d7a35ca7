"""The tensors inside what a module takes and returns: in dicts, lists, named tuples, dataclasses, however nested.

torch's pytree looks into the containers it has been told of. A dataclass or a subclass of dict that nobody has
registered is a leaf to it; here they are looked into as well.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside `value`, itself if it is one."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif parts := _parts(leaf):
            yield from tensors_in(list(parts.values()))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `change(tensor)` for each tensor inside it, every container of its own type.

    Nothing is changed in place: a dataclass or dict subclass with a changed tensor is copied, another is passed on.
    """

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        parts = _parts(leaf)
        changed = {name: map_tensors(change, part) for name, part in parts.items()}
        if all(changed[name] is part for name, part in parts.items()):
            return leaf
        return _with_parts(leaf, changed)

    return pytree.tree_map(change_leaf, value)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor inside it in `dtype`; all else as it is."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _parts(leaf: Any) -> dict[Any, Any]:
    """The parts of a leaf of pytree by name or key: {} if it is no container."""
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
    return {}


def _with_parts(leaf: Any, parts: dict[Any, Any]) -> Any:
    """A copy of a container with other parts. Not by its constructor, which may take other arguments."""
    changed = copy.copy(leaf)
    for name, part in parts.items():
        if isinstance(changed, MutableMapping):
            changed[name] = part
        else:
            object.__setattr__(changed, name, part)  # also where the dataclass is frozen
    return changed
