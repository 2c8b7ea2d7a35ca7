"""The weights under the names that others know, as tensors to be written."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerotrain.checkpoint.others.safetensors_and_torch import OutTensor
from zerotrain.checkpoint.verify import CheckpointTensors
from zerotrain.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_MODEL = "model."
"""`HuggingFaceModel` puts this before the names of transformers."""
IN_PEFT = "base_model.model."
"""Peft puts this before them, in its files too."""
ADAPTER = ".default."


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return ".lora_" in name


def name_of_hugging_face(name: str) -> str:
    """The name of a `HuggingFaceModel`'s parameter in transformers, or of an adapter's in peft."""
    return name.removeprefix(IN_MODEL)


def plain(
    saved: CheckpointTensors, dtype: torch.dtype | None, name_of: Callable[[str], str] = str
) -> dict[str, OutTensor]:
    """All parameters and buffers; of a tied one by its first name, or by what others call that."""
    return {name_of(name): _tensor(saved, name, dtype) for name in saved.names}


def adapters(saved: CheckpointTensors, dtype: torch.dtype | None) -> dict[str, OutTensor]:
    """The matrices of the adapters alone, as peft's files have them."""
    names = [name for name in saved.names if is_of_adapter(name)]
    return {".".join(name_of_hugging_face(name).rsplit(ADAPTER, 1)): _tensor(saved, name, dtype) for name in names}


def merged(saved: CheckpointTensors, dtype: torch.dtype | None, lora: Mapping[str, Any]) -> dict[str, OutTensor]:
    """The weights with what the adapters add to them, by the names of transformers without peft.

    Args:
        lora: `scaling` of what they add, and `fan_in_fan_out`: whether weights lie the other way round, as GPT-2's.
    """
    found = {}
    for name in saved.names:
        if is_of_adapter(name):
            continue
        layer, is_layer, rest = name.partition(".base_layer.")
        known = f"{layer}.{rest}" if is_layer else name
        pair = [f"{layer}.lora_{which}{ADAPTER}weight" for which in "AB"]
        has_adapter = bool(is_layer) and rest == "weight" and pair[0] in saved.names
        tensor = _merged(saved, name, pair, dtype, lora) if has_adapter else _tensor(saved, name, dtype)
        found[name_of_hugging_face(known).removeprefix(IN_PEFT)] = tensor
    return found


def _merged(
    saved: CheckpointTensors, name: str, pair: list[str], dtype: torch.dtype | None, lora: Mapping[str, Any]
) -> OutTensor:
    own, shape = saved.names[name]

    def read() -> torch.Tensor:
        down, up = (saved.read(each).float() for each in pair)  # (rank, in), (out, rank)
        added = up @ down * lora["scaling"]  # (out, in)
        return saved.read(name).float() + (added.t() if lora["fan_in_fan_out"] else added)

    return OutTensor(dtype or own, shape, read)


def _tensor(saved: CheckpointTensors, name: str, dtype: torch.dtype | None) -> OutTensor:
    own, shape = saved.names[name]
    return OutTensor(dtype if dtype is not None and own.is_floating_point else own, shape, lambda: saved.read(name))


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that `--dtype` names; None if it is not given.

    Raises:
        ConfigError: there is no such dtype.
    """
    if name is None or name in DTYPES:
        return None if name is None else DTYPES[name]
    raise ConfigError(f"--dtype: got {name}; it must be one of {', '.join(DTYPES)}; without it, as it was saved")
