"""Weights that somebody made to take a program's memory, time or place: one line each."""

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from zerotrain.checkpoint.others import safetensors_and_torch as torch_file
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.engine.state.from_weights import weight_misfits
from zerotrain.errors import CheckpointError

MANY = 10**30


def safetensors(folder: Path, header: Any, nbytes: int = 4) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return folder


def entry(**fields: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields}


HEADERS: dict[str, tuple[Any, str]] = {
    "a length that torch cannot have": (entry(shape=[MANY, 0], data_offsets=[0, 0]), "shape: got .1000000.*lengths"),
    "lengths too long together": (entry(shape=[2**40, 2**40, 0]), "shape: got .*lengths"),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, "shape is missing"),
    "backwards": (entry(data_offsets=[4, 0]), "gives x a place where it cannot be"),
    "far behind": (entry(data_offsets=[MANY, MANY]), "data_offsets.*: .*it must be a whole number <="),
    "a dtype that is a list": (entry(dtype=["F32"]), "dtype: got a list; it must be a text"),
    "a tensor that is a number": ({"x": 3}, "got a whole number; it must be a mapping"),
    "lists in lists": (b'{"x":' + b"[" * 9999 + b"]" * 9999 + b"}", "more than 64 deep"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_says_what_cannot_be_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    header, says = HEADERS[case]
    refused(safetensors(tmp_path, header), says)


def refused(path: Path, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        find_weights(path).close()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["../model-0.safetensors", "\x1b[2J", 3])
def test_an_index_names_files_of_its_own_folder_alone(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors(tmp_path, entry()).joinpath("model.safetensors").rename(tmp_path / "model-0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refused(folder, "weight_map.*: .* the name of a file in this folder")
    transformers = pytest.importorskip("zerotrain.models.pretrained")
    with pytest.raises(ValueError, match="the name of a file in this folder"):
        transformers.find_weights(str(folder))


def test_lists_that_double_take_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MAX_TENSORS", 10_000)  # a million takes seconds
    content: Any = {"x": torch.ones(1)}
    for _ in range(60):  # as many tensors as 2**60, of some bytes of a file
        content = [content, content]
    torch.save({"x": content}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "holds more than 10,000 tensors, or lists that contain themselves")


def test_a_view_beyond_its_numbers_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(4).as_strided((2,), (1,), 2)}, tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    at = content.index(b"K\x02K\x02\x85")  # the offset 2, and the shape (2,)
    (tmp_path / "pytorch_model.bin").write_bytes(content[: at + 1] + b"\x63" + content[at + 2 :])
    refused(tmp_path, "is damaged: a tensor lies at byte .*, where none can")


def test_a_pickle_takes_no_memory_by_a_number_in_it(tmp_path: Path) -> None:
    """LONG_BINPUT with 2**25: the unpickler in C makes a table of 512 MB, and with 2**31 - 1 one of 32 GB."""
    tmp_path.joinpath(".metadata").write_bytes(b"\x80\x02}r\x00\x00\x00\x02.")
    assert growth_of(lambda: refused(tmp_path, "no .metadata of torch.distributed.checkpoint, or damaged")) < 10**8


def growth_of(call: Callable[[], object]) -> int:
    """Bytes of memory that a call takes at most beside what a process has."""
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            call()
            os.write(writes, str(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(pid, 0)
    with os.fdopen(reads) as file:
        return int(file.read())


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
def test_a_folder_of_dcp_whose_numbers_cannot_be_is_refused(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(4, 4)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    for change, says in (
        (lambda each: setattr(each, "offset", -1), "no .metadata"),
        (lambda each: setattr(each, "length", True), "no .metadata"),
        (lambda each: setattr(each, "length", 10**15), "is cut: .* and .metadata says 1"),
        (lambda each: setattr(each, "relative_path", "a/b"), "no .metadata"),
        (lambda each: setattr(each, "relative_path", 3), "no .metadata"),
    ):
        content = path.read_bytes()
        metadata = pickle.loads(content)
        for each in metadata.storage_data.values():
            change(each)
        path.write_bytes(pickle.dumps(metadata))
        refused(tmp_path, says)
        path.write_bytes(content)
    metadata = pickle.loads(content)
    metadata.state_dict_metadata["x"].size = (MANY, 0)
    metadata.state_dict_metadata["x"].chunks = []
    path.write_bytes(pickle.dumps(metadata))
    refused(tmp_path, "no .metadata")


def test_names_out_of_a_file_are_escaped(tmp_path: Path) -> None:
    """In what is told of weights that do not fit."""
    safetensors(tmp_path, {"\x1b[31m\u202egnp\nx": entry()["x"]})
    model = nn.Linear(1, 1)
    with pytest.raises(CheckpointError) as caught:
        raise CheckpointError("\n".join(weight_misfits(tmp_path, model)))
    assert all(line.isprintable() for line in str(caught.value).splitlines())
