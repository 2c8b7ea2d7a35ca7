"""The optimizer's state whole, by the names of parameters, in the form of torch's own `state_dict`."""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT, dtype_of
from zerotrain.checkpoint.tensor_file import chunks
from zerotrain.checkpoint.verify import CheckpointTensors
from zerotrain.errors import ConfigError


def require_optimizer(saved: CheckpointTensors) -> None:
    """Make sure that there is something to write.

    Raises:
        ConfigError: nothing trains, or the optimizers of groups have no state dict in common.
    """
    if not any(parameter["trains"] for parameter in saved.manifest.parameters.values()):
        raise ConfigError(f"--optimizer: {saved.path} has no parameter that trains; leave it out")


def trained(saved: CheckpointTensors) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of the groups, as the manifest has them."""
    for name, parameter in saved.manifest.parameters.items():
        if parameter["trains"]:
            yield name, parameter


def param_groups(saved: CheckpointTensors, name_of: Callable[[str], str] = str) -> list[dict[str, Any]]:
    """As in a state dict of torch.optim, with names for numbers under "params".

    Args:
        name_of: what others call a parameter.
    """
    groups = []
    for number, group in enumerate(saved.manifest.content["groups"]):
        values = {name: _plain(value) for name, value in group["hyperparameters"].items() if not _is_object(value)}
        params = [name_of(name) for name, parameter in trained(saved) if parameter["group"] == number]
        groups.append({**values, "initial_lr": group["first_lr"], "params": params})
    return groups


def counts_of(parameter: dict[str, Any]) -> dict[str, Any]:
    """State kept once for a parameter, such as its number of steps; none for one without elements, for which torch's
    optimizers would miss the other state."""
    if prod(parameter["shape"]) == 0:
        return {}
    return {name: _value(value) for name, value in parameter["counts"].items()}


def roles_of(parameter: dict[str, Any]) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """(role, dtype, shape) of what is kept of each element of a parameter, or of it as a whole."""
    for role, tensor in parameter["tensors"].items():
        if role not in (WEIGHT, AVERAGE):
            yield role, dtype_of(tensor), tensor.get("shape", parameter["shape"])


def write_optimizer(path: Path, saved: CheckpointTensors, name_of: Callable[[str], str] = str) -> None:
    """{"state": {name: {exp_avg, ...}}, "param_groups": [...]} for `torch.load(path, weights_only=True)`.

    torch.save writes the file with room for the tensors and without them; then each is written into its place.

    Args:
        name_of: what others call a parameter, as in the weights beside it.
    """
    with FakeTensorMode():
        state = {name_of(name): _described(parameter) for name, parameter in trained(saved)}
    state = {name: kept for name, kept in state.items() if kept}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state": state, "param_groups": param_groups(saved, name_of)}, path)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)["state"]
    with open(path, "r+b") as file:
        for name, parameter in trained(saved):
            counts = counts_of(parameter)
            for role, place in places.get(name_of(name), {}).items():
                if isinstance(place, torch.Tensor) and place.numel() > 0:
                    offset = place.untyped_storage()._checkpoint_offset
                    assert offset is not None
                    file.seek(offset)
                    _write(file, counts[role] if role in counts else saved.of_role(name, role))


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
    return torch.tensor(value["value"], dtype=dtype_of(value)) if isinstance(value, dict) else value
