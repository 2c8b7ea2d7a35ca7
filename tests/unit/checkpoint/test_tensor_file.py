"""The file of a rank: tensors begin where their elements are aligned, and no block cuts an element."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerotrain
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.manifest import BLOCK_NBYTES, read_manifest
from zerotrain.checkpoint.tensor_file import Entry, Reader, TensorFile, flat_bytes
from zerotrain.errors import CheckpointError

DTYPES = (torch.int8, torch.bfloat16, torch.float64, torch.bool, torch.float32, torch.int64, torch.float16)


def read(entry: Entry) -> Iterator[memoryview]:
    yield flat_bytes(entry.values).numpy().data


def test_tensors_of_all_sizes_of_elements_begin_aligned_in_whatever_order_they_come(tmp_path: Path) -> None:
    values = {f"{number} {dtype}": torch.ones(3, dtype=dtype) for number in range(2) for dtype in DTYPES}
    file = TensorFile("file", [Entry(name, "weight", each, 0) for name, each in values.items()], {})
    assert list(file.write(tmp_path, read)) == []
    places = {piece["name"]: piece["byte"] for piece in file.described()["pieces"]}
    assert places.keys() == values.keys()
    assert [name for name, each in values.items() if places[name] % each.itemsize] == []
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[f"weight/{name}"], each) for name, each in values.items())


# What is read of a checkpoint was verified: also behind a block that was damaged.


def test_behind_a_damaged_block_the_one_before_it_is_read_anew(tmp_path: Path) -> None:
    """Both are read into the same memory."""
    model = torch.nn.Linear(BLOCK_NBYTES, 1, bias=False)  # 4 MiB and the header
    engine = zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=alone())
    manifest = read_manifest(engine.save(tmp_path / "step"))
    file = tmp_path / "step" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[2 * BLOCK_NBYTES] ^= 1
    file.write_bytes(content)
    expected, weight = model.weight.detach()[0, 7:9].clone(), manifest.parameters["weight"].tensors["weight"]
    with Reader(tmp_path / "step", manifest) as reader:
        for _ in range(2):
            found = torch.empty(2)
            reader.read(weight, 7, found)
            assert torch.equal(found, expected)
            with pytest.raises(CheckpointError, match=f"bytes {2 * BLOCK_NBYTES} to"):
                reader.check_block(0, 2)
            with pytest.raises(CheckpointError, match="is not what was written"):
                reader.check_block(0, 2)
