"""State of modules beside their tensors, by PyTorch's `get_extra_state` and `set_extra_state`: rank 0's is saved."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import EXTRA_STATE, dtype_of
from zerotrain.checkpoint.tensor_file import Entry, Reader


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in the model's state dict, module)."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def extra_states(model: nn.Module) -> dict[str, Any]:
    """By name, as the modules give it now."""
    return {name: module.get_extra_state() for name, module in modules_with_extra_state(model)}


def entries_of(states: Mapping[str, Any]) -> list[Entry]:
    """Those that are tensors, as they are now."""
    tensors = {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}
    return [Entry(name, EXTRA_STATE, values.detach().reshape(-1).clone(), 0) for name, values in tensors.items()]


def described(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For the manifest: {"value": ...}, or a tensor without its pieces."""
    return {
        name: {"shape": list(state.shape), "dtype": str(state.dtype).removeprefix("torch."), "pieces": []}
        if isinstance(state, torch.Tensor)
        else {"value": state}
        for name, state in states.items()
    }


def restore_extra_states(model: nn.Module, saved: Mapping[str, dict[str, Any]], reader: Reader) -> None:
    """Give the modules theirs: tensors on the CPU."""
    for name, module in modules_with_extra_state(model):
        if (state := saved.get(name)) is None:
            continue  # a checkpoint from before they were saved
        if "value" in state:
            module.set_extra_state(state["value"])
            continue
        values = torch.empty(state["shape"], dtype=dtype_of(state))
        if values.numel() > 0:
            reader.read(state, 0, values)
        module.set_extra_state(values)
