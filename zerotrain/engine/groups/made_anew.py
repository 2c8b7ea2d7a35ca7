"""An optimizer made anew from what it keeps in its state, as changes of stage and of what trains and checkpoints do it.

State that an optimizer keeps elsewhere is lost: in a dict of its own, in another optimizer inside it, in a counter.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from inspect import isroutine
from types import ModuleType
from typing import Any

import torch

from zerotrain.engine.groups.own_numbers import is_number

Tensors = list[torch.Tensor]
DEPTH = 6
"""Levels of nested objects that are searched."""


def made_anew(
    old: torch.optim.Optimizer, tensors: Tensors, make: Callable[[Tensors], torch.optim.Optimizer]
) -> tuple[Tensors, torch.optim.Optimizer]:
    """Copies of tensors, and an optimizer of them with the state of the old one."""
    copies = [tensor.detach().clone() for tensor in tensors]
    new = make(copies)
    for tensor, copied in zip(tensors, copies, strict=True):
        if state := old.state.get(tensor):
            new.state[copied] = deepcopy(state)
    return copies, new


def unfit_in_state(optimizer: torch.optim.Optimizer, *, is_whole: bool) -> list[str]:
    """The parts of an optimizer's state that belong to no tensor, or hold tensors that nobody can cut; nothing is cut
    where tensors are updated whole."""
    tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    found = [f"self.state[{key!r}]" for key in optimizer.state if id(key) not in tensors]
    kept = [each for key, state in optimizer.state.items() if id(key) in tensors for each in state.items()]
    for name, value in () if is_whole else kept:
        is_plain = isinstance(value, torch.Tensor) or is_number(value)
        if not is_plain and any(isinstance(each, torch.Tensor) for each in _leaves(value, set())):
            found.append(f"self.state[parameter][{name!r}]")
    return list(dict.fromkeys(found))


def kept_elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """The tensors and numbers that an optimizer has outside of its state and its groups, by the attribute they are in:
    none of what torch gives every optimizer."""
    groups = optimizer.param_groups
    known = [optimizer.state, *optimizer.state.values(), groups, *groups]
    known += [value for state in optimizer.state.values() for value in state.values()]
    known += [tensor for group in groups for tensor in group["params"]]
    seen = {id(each) for each in known}
    own = {name: value for name, value in vars(optimizer).items() if name not in _attributes_of_torch()}
    return {name: list(_leaves(value, seen)) for name, value in own.items()}


def differing(left: Mapping[str, Sequence[Any]], right: Mapping[str, Sequence[Any]]) -> list[str]:
    """The attributes in which two results of `kept_elsewhere` differ."""
    return [name for name, kept in left.items() if not _are_same(kept, right.get(name, ()))]


def tensors_alone(kept: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """A result of `kept_elsewhere` without its numbers, which may count for nothing."""
    return {name: [each for each in values if isinstance(each, torch.Tensor)] for name, values in kept.items()}


@cache
def _attributes_of_torch() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(())], lr=0.0))) | {"step", "_step_count", "_opt_called"}


def _leaves(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """The tensors and numbers in an object, each tensor once."""
    if is_number(value) and not isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and depth <= DEPTH:
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
            return
        for each in _parts(value):
            yield from _leaves(each, seen, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, type | ModuleType) or isroutine(value):
        return []
    return list(value.values()) if isinstance(value, Mapping) else gc.get_referents(value)


def _are_same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(_is_same, left, right))


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or (
            left.shape == right.shape and torch.allclose(left.double(), right.double(), rtol=1e-4, equal_nan=True)
        )
    return bool(left == right) or (left != left and right != right)
