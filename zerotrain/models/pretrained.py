"""Weights of a pretrained model from safetensors files, one tensor in memory at a time. Needs the extra hf."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from zerotrain.files.match import Misfits, StoredTensor, any_kind, match, model_tensors
from zerotrain.files.untrusted import FileName, read_json, shown


class _PretrainedIndex(Struct):
    weight_map: dict[str, FileName]


MAX_INDEX_NBYTES = 100_000_000


@contextmanager
def _open_safetensors(path: str) -> Iterator[Any]:
    """A safetensors file; ValueError where it is none, is damaged, or lacks a tensor read from it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {shown(str(error))}") from error


@torch.library.custom_op("zerotrain::read_tensor", mutates_args=())
def read_tensor(path: str, name: str) -> torch.Tensor:
    """Tensor `name` of a safetensors file, on the CPU.

    An operation of torch: recorders of a constructor's operations can repeat it.
    """
    with _open_safetensors(path) as file:
        return file.get_tensor(name).clone()


def find_weights(name_or_path: str) -> dict[str, str] | None:
    """Name of each tensor -> its safetensors file. A model of the hub is downloaded first.

    Returns:
        None where the weights are in another format.

    Raises:
        OSError: there are no weights at all.
        ValueError: they are damaged.
    """
    index = _find(name_or_path, "model.safetensors.index.json")
    if index is not None:
        parts = read_json(index, _PretrainedIndex, max_nbytes=MAX_INDEX_NBYTES).weight_map
        paths = {part: _find(name_or_path, part) for part in sorted(set(parts.values()))}
        missing = [part for part, path in paths.items() if path is None]
        if missing:
            raise OSError(f"it lacks {', '.join(map(shown, missing))}")
        return {name: str(paths[part]) for name, part in parts.items()}
    file = _find(name_or_path, "model.safetensors")
    if file is not None:
        with _open_safetensors(file) as opened:
            return dict.fromkeys(opened.keys(), file)
    if not any(_find(name_or_path, name) for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        raise OSError("it holds neither model.safetensors nor pytorch_model.bin")
    return None


def _find(name_or_path: str, file: str) -> str | None:
    return cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)


def require_shapes(model: torch.nn.Module, files: Mapping[str, str]) -> None:
    """Compare the shapes of a model's files with the model after changes of its config; it may be on the meta device.
    ValueError where a tensor has another shape than the model's of the same name."""
    if wrong := _matched(model, files).wrong_shape:
        raise ValueError(
            f"model.config: the weights do not fit the model: {wrong[0]}; leave out the fields that change it"
        )


def load_weights(model: torch.nn.Module, files: Mapping[str, str]) -> bool:
    """Copy tensors from files into the parameters and buffers of the same names. False, and nothing is copied, where
    names or shapes are not exactly those of the model. One name of tied tensors is enough."""
    if _matched(model, files) != Misfits((), (), (), ()):
        return False
    targets = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, path in files.items():
            targets[name].copy_(torch.ops.zerotrain.read_tensor(path, name))
    return True


def _matched(model: torch.nn.Module, files: Mapping[str, str]) -> Misfits:
    tensors = []
    for path in dict.fromkeys(files.values()):
        with _open_safetensors(path) as file:
            for name in (name for name in files if files[name] == path):
                tensors.append(StoredTensor([name], "", None, tuple(file.get_slice(name).get_shape())))
    return match(tensors, model_tensors(model.state_dict(keep_vars=True).items()), kind=any_kind)
