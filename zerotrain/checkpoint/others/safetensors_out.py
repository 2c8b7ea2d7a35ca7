"""Safetensors files for others: in parts of a size, with an index as Hugging Face has it, one tensor in memory at a
time."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from zerotrain.checkpoint.blocks import BlockWriter
from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, CODES, chunks, planned
from zerotrain.errors import CheckpointError


@dataclass(frozen=True)
class OutTensor:
    """One tensor that is to be written."""

    dtype: torch.dtype
    """As it is written."""
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Called when its turn comes; its values are converted to `dtype`."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(folder: Path, tensors: Mapping[str, OutTensor], *, max_nbytes: int, stem: str = "model") -> int:
    """Write tensors into one file `STEM.safetensors`, or where they are larger than `max_nbytes` into several
    `STEM-00001-of-00002.safetensors` with `STEM.safetensors.index.json`; all of it is on the disk at the end.

    Returns:
        How many files.

    Raises:
        CheckpointError: the format does not have a dtype.
        OSError: a file cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors files do not have")
    parts = _parts(tensors, max_nbytes)
    names = [f"{stem}.safetensors"]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(names, parts, strict=True):
        _write_file(folder / file, {name: tensors[name] for name in part})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part},
        }
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return len(parts)


def write_text(path: Path, text: str) -> None:
    """Write a new file, and wait until it is on the disk."""
    with closing(BlockWriter(path)) as writer:
        writer.write(memoryview(text.encode()))
        writer.sync()


def _parts(tensors: Mapping[str, OutTensor], max_nbytes: int) -> list[list[str]]:
    """The names of each file, in order: as many as fit, at least one."""
    parts: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and nbytes + tensor.nbytes > max_nbytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(name)
        nbytes += tensor.nbytes
    return parts


def _write_file(path: Path, tensors: Mapping[str, OutTensor]) -> None:
    # Larger elements first, as the library has it: so each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda each: -each[1].dtype.itemsize)
    described = [(name, CODES[each.dtype], each.shape, each.nbytes) for name, each in ordered]
    head, _ = planned(described, {"format": "pt"})
    with closing(BlockWriter(path)) as writer:
        writer.write(memoryview(head))
        for _, tensor in ordered:
            if tensor.nbytes:
                _write_tensor(writer, tensor)
        writer.sync()


def _write_tensor(writer: BlockWriter, tensor: OutTensor) -> None:
    # A function of its own: its last chunk is memory of the tensor, and would keep it while the next one is read.
    for part in tensor.read().reshape(-1).split(CHUNK_NBYTES):
        for chunk in chunks(part.to(tensor.dtype)):
            writer.write(chunk)
