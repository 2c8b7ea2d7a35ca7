"""Numbers that an optimizer adds to its groups in a step, such as the number of steps.

They go with the state of the group's tensors, from which they come back before the next step: so they are where their
tensors go, in a checkpoint too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

OF_GROUP = "of its group: "
"""Begins their names in the state."""
_NUMBERS = (bool, int, float, str, type(None))


def is_number(value: object) -> bool:
    """Whether something is kept once, and in a form that a checkpoint has."""
    return type(value) in _NUMBERS or (isinstance(value, torch.Tensor) and value.ndim == 0)


@contextmanager
def own_numbers(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Give groups, in here, the numbers that the optimizer has added to them, beside the `settings` of each."""
    for group in optimizer.param_groups:
        for target in group["params"]:
            state = optimizer.state.get(target, {})
            for name in [each for each in state if str(each).startswith(OF_GROUP)]:
                group[name.removeprefix(OF_GROUP)] = state.pop(name)
    yield
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        added = group.keys() - given.keys() - {"params"}
        for name in [each for each in group if each in added and is_number(group[each])]:
            value = group.pop(name)
            for target in group["params"]:
                optimizer.state[target][OF_GROUP + name] = value
