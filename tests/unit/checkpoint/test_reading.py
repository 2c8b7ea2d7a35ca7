"""What is read of a checkpoint was verified: also behind a block that was damaged."""

from pathlib import Path

import pytest
import torch

import zerotrain
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.manifest import BLOCK_NBYTES, read_manifest
from zerotrain.checkpoint.tensor_file import Reader
from zerotrain.errors import CheckpointError


def test_behind_a_damaged_block_the_one_before_it_is_read_anew(tmp_path: Path) -> None:
    """Both are read into the same memory."""
    model = torch.nn.Linear(BLOCK_NBYTES, 1, bias=False)  # 4 MiB and the header
    engine = zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=alone())
    manifest = read_manifest(engine.save(tmp_path / "step"))
    file = tmp_path / "step" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[2 * BLOCK_NBYTES] ^= 1
    file.write_bytes(content)
    expected, weight = model.weight.detach()[0, 7:9].clone(), manifest.parameters["weight"]["tensors"]["weight"]
    with Reader(tmp_path / "step", manifest) as reader:
        for _ in range(2):
            found = torch.empty(2)
            reader.read(weight, 7, found)
            assert torch.equal(found, expected)
            with pytest.raises(CheckpointError, match=f"bytes {2 * BLOCK_NBYTES} to"):
                reader.check_block(0, 2)
            with pytest.raises(CheckpointError, match="is not what was written"):
                reader.check_block(0, 2)
