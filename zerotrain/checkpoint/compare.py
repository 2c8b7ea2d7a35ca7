"""Two checkpoints side by side, however each was cut: which tensors differ, and by how much."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.manifest import Manifest, dtype_of, pieces_of
from zerotrain.checkpoint.reading import Reader

CHUNK_NUMEL = 2**20


def differences(left: tuple[Path, Manifest], right: tuple[Path, Manifest]) -> Iterator[str]:
    """A line for each tensor that is not the same in both, such as "exp_avg of blocks.0.weight: 3 of 9 elements, by up
    to 0.1", in the order of the model. Some MiB are held at a time.

    Raises:
        CheckpointError: a file is not what was written.
    """
    tensors = [{(name, role): tensor for name, role, tensor in manifest.tensors()} for _, manifest in (left, right)]
    with Reader(*left) as left_reader, Reader(*right) as right_reader:
        for name, role in dict.fromkeys([*tensors[0], *tensors[1]]):
            label = f"{role} of {name}"
            one, other = tensors[0].get((name, role)), tensors[1].get((name, role))
            if one is None or other is None:
                yield f"{label}: only in {(right if one is None else left)[0]}"
                continue
            numels = [max((piece.stop for piece in pieces_of(each)), default=0) for each in (one, other)]
            kinds = [f"{each['dtype']}, {numel} elements" for each, numel in zip((one, other), numels, strict=True)]
            if kinds[0] != kinds[1]:
                yield f"{label}: {kinds[0]} against {kinds[1]}"
            elif what := _values(one, other, numels[0], left_reader, right_reader):
                yield f"{label}: {what}"


def _values(one: dict[str, Any], other: dict[str, Any], numel: int, left: Reader, right: Reader) -> str | None:
    num_different, largest = 0, 0.0
    for start in range(0, numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, numel)
        ours, theirs = _elements(one, start, stop, left), _elements(other, start, stop, right)
        changed = (_bits(ours) != _bits(theirs)).any(dim=1)
        if changed.any():
            num_different += int(changed.sum())
            wide = torch.complex128 if ours.is_complex() else torch.float64
            gap = float((ours[changed].to(wide) - theirs[changed].to(wide)).abs().max())
            largest = max(largest, gap) if gap == gap else gap
    return f"{num_different} of {numel} elements, by up to {largest:.3g}" if num_different else None


def _elements(tensor: dict[str, Any], start: int, stop: int, reader: Reader) -> torch.Tensor:
    values = torch.empty(stop - start, dtype=dtype_of(tensor))
    reader.read(tensor, start, values)
    return values


def _bits(values: torch.Tensor) -> torch.Tensor:
    """(numel, itemsize) bytes: what is not a number is the same as itself."""
    return values.view(torch.uint8).view(-1, values.itemsize)
