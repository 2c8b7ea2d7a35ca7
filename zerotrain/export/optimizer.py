"""The optimizer's state whole, by the names of parameters, in the form of torch's own `state_dict`."""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.checkpoint.manifest import WEIGHT, dtype_of
from zerotrain.checkpoint.tensor_file import chunks
from zerotrain.checkpoint.whole import SavedTensors
from zerotrain.errors import ConfigError


def require_optimizer(saved: SavedTensors) -> None:
    """Make sure that there is something to write.

    Raises:
        ConfigError: nothing trains, or the optimizers of groups have no state dict in common.
    """
    if not any(parameter["trains"] for parameter in saved.manifest.parameters.values()):
        raise ConfigError(f"--optimizer: {saved.path} has no parameter that trains; leave it out")


def trained(saved: SavedTensors) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of the groups, as the manifest has them."""
    for name, parameter in saved.manifest.parameters.items():
        if parameter["trains"]:
            yield name, parameter


def param_groups(saved: SavedTensors) -> list[dict[str, Any]]:
    """As in a state dict of torch.optim, with names for numbers under "params"."""
    groups = []
    for number, group in enumerate(saved.manifest.content["groups"]):
        values = {name: _plain(value) for name, value in group["hyperparameters"].items() if not _is_object(value)}
        params = [name for name, parameter in trained(saved) if parameter["group"] == number]
        groups.append({**values, "initial_lr": group["first_lr"], "params": params})
    return groups


def counts_of(parameter: dict[str, Any]) -> dict[str, Any]:
    """What is kept once for a parameter, such as the number of its steps; nothing for one without elements, of which
    torch's optimizers would miss the rest."""
    if prod(parameter["shape"]) == 0:
        return {}
    return {name: _value(value) for name, value in parameter["counts"].items()}


def roles_of(parameter: dict[str, Any]) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """(role, dtype, shape) of what is kept of each element of a parameter, or of it as a whole."""
    for role, tensor in parameter["tensors"].items():
        if role != WEIGHT:
            yield role, dtype_of(tensor), tensor.get("shape", parameter["shape"])


def write_optimizer(path: Path, saved: SavedTensors) -> None:
    """{"state": {name: {exp_avg, ...}}, "param_groups": [...]} for `torch.load(path, weights_only=True)`.

    torch.save writes the file with room for the tensors and without them; then each is written into its place.
    """
    with FakeTensorMode():
        state = {name: _described(parameter) for name, parameter in trained(saved)}
    state = {name: kept for name, kept in state.items() if kept}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state": state, "param_groups": param_groups(saved)}, path)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)["state"]
    with open(path, "r+b") as file:
        for name, kept in places.items():
            counts = counts_of(saved.manifest.parameters[name])
            for role, place in kept.items():
                if isinstance(place, torch.Tensor) and place.numel() > 0:
                    offset = place.untyped_storage()._checkpoint_offset
                    assert offset is not None
                    file.seek(offset)
                    _write(file, counts[role] if role in counts else saved.of_role(name, role))
        file.flush()
        os.fsync(file.fileno())


def _write(file: BinaryIO, values: torch.Tensor) -> None:
    for chunk in chunks(values):
        file.write(chunk)


def _described(parameter: dict[str, Any]) -> dict[str, Any]:
    tensors = {role: torch.empty(shape, dtype=dtype) for role, dtype, shape in roles_of(parameter)}
    return counts_of(parameter) | tensors


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and "object" in value


def _plain(value: Any) -> Any:
    """A hyperparameter as a number, also where a tensor held it on a device."""
    if isinstance(value, dict):
        return value["value"]
    return tuple(_plain(each) for each in value) if isinstance(value, list) else value


def _value(value: Any) -> Any:
    return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"])) if isinstance(value, dict) else value
