"""The file of a rank: tensors begin where their elements are aligned, and no block cuts an element."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from zerotrain.checkpoint.tensor_file import Entry, TensorFile, flat_bytes

DTYPES = (torch.int8, torch.bfloat16, torch.float64, torch.bool, torch.float32, torch.int64, torch.float16)


def read(entry: Entry) -> Iterator[memoryview]:
    yield flat_bytes(entry.values).numpy().data


def test_tensors_of_all_sizes_of_elements_begin_aligned_in_whatever_order_they_come(tmp_path: Path) -> None:
    values = {f"{number} {dtype}": torch.ones(3, dtype=dtype) for number in range(2) for dtype in DTYPES}
    file = TensorFile("file", [Entry(name, "weight", each, 0) for name, each in values.items()], {})
    assert list(file.write(tmp_path, read)) == []
    places = {name: tensor.pieces[0].byte for name, _, tensor in file.described(0).pieces}
    assert places.keys() == values.keys()
    assert [name for name, each in values.items() if places[name] % each.itemsize] == []
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[f"weight/{name}"], each) for name, each in values.items())


# What is read of a checkpoint was verified: also behind a block that was damaged.
