"""Weights go into as many files as they need, and no more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zerotrain.checkpoint.others.safetensors_and_torch import OutTensor, write_safetensors


def of(numel: int) -> OutTensor:
    return OutTensor(torch.float32, (numel,), lambda: torch.full((numel,), float(numel)))


@pytest.mark.parametrize(
    ("numels", "files"),
    [
        ([5, 5], [2]),
        ([5, 6], [1, 1]),
        ([4, 3, 4, 3, 4, 3], [2, 2, 2]),
        ([1, 2, 3, 4, 5, 6], [4, 1, 1]),
        ([20, 1, 1, 20], [1, 2, 1]),
        ([], [0]),
    ],
)
def test_a_file_takes_what_fits_at_least_one(numels: list[int], files: list[int], tmp_path: Path) -> None:
    tensors = {f"t{number}": of(numel) for number, numel in enumerate(numels)}
    assert write_safetensors(tmp_path, tensors, max_nbytes=40) == len(files)
    found = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [len(each) for each in found] == files
    assert {name: value.tolist() for each in found for name, value in each.items()} == {
        name: tensor.read().tolist() for name, tensor in tensors.items()
    }
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() is (len(files) > 1)
    if index.exists():
        said = json.loads(index.read_text())
        assert said["metadata"]["total_size"] == 4 * sum(numels)
        assert list(said["weight_map"]) == list(tensors)
