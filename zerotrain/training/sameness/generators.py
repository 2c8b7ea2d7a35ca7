"""The generators of random numbers that a model keeps of its own.

Torch's, Python's and numpy's global ones are seeded anew for each micro-batch (`seeds.py`), so nothing need be kept of
them. One that a module has made for itself goes on from where it is: its state belongs to a checkpoint.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def generator_states(model: nn.Module) -> dict[str, Any] | None:
    """The states of generators that are attributes of modules, by dotted name, for JSON; None: there are none."""
    return {name: _state_of(generator) for name, generator in _generators(model)} or None


def restore_generators(model: nn.Module, states: Mapping[str, Any] | None) -> None:
    """Give generators the states that `generator_states` gave; one that is not among them stays as it is."""
    for name, generator in _generators(model):
        if states is not None and name in states:
            _restore(generator, states[name])


def _generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
                yield f"{prefix}.{name}" if prefix else name, value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.bit_generator.state = _arrays(state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {name: _arrays(each) for name, each in value.items()}
