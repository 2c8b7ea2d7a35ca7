"""What damage does to checkpoints of torch: their columns in the table of docs/reference/checkpoint_promises.md.

The column `here` is held by test_damage.py.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "checkpoint_promises.md"
NUMEL = 4096
Tensors = dict[str, torch.Tensor]


def original() -> Tensors:
    return {"first": torch.arange(NUMEL, dtype=torch.float32), "second": -torch.arange(NUMEL, dtype=torch.float32)}


def save_dcp(folder: Path) -> None:
    """Each tensor in a file of its own, as tensors of several ranks are."""
    dcp.save(original(), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)


def load_dcp(folder: Path) -> Tensors:
    loaded = {name: torch.zeros(NUMEL) for name in original()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def save_files(folder: Path) -> None:
    for name, value in original().items():
        torch.save({"values": value}, folder / f"{name}.pt")


def load_files(folder: Path) -> Tensors:
    return {name: torch.load(folder / f"{name}.pt")["values"] for name in original()}


FORMATS = {"DCP": (save_dcp, load_dcp, "*.distcp"), "torch.save": (save_files, load_files, "*.pt")}


def flip(files: list[Path]) -> None:
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 1
    files[1].write_bytes(content)


def swap(files: list[Path]) -> None:
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "a byte of a tensor flipped": flip,
    "a file cut": lambda files: os.truncate(files[1], files[1].stat().st_size // 2),
    "a file removed": lambda files: files[1].unlink(),
    "two files swapped": swap,
}


def table() -> dict[str, dict[str, str]]:
    lines = DOCS.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| damage |"))
    names, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[start : start + 6]]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_damage_does_is_what_the_docs_say(damage: str, name: str, tmp_path: Path) -> None:
    """Should a cell for torch fail one day, the docs are to be mended."""
    save, load, pattern = FORMATS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP: that there is one process
        save(tmp_path)
        files = sorted(tmp_path.glob(pattern))
        assert len(files) == 2
        DAMAGES[damage](files)
        try:
            loaded = load(tmp_path)
        except (Exception, dcp.api.CheckpointException):  # DCP's own is no Exception
            outcome = "an error"
        else:
            outcome = "loaded without a word"
            assert any(not torch.equal(value, original()[key]) for key, value in loaded.items())
    assert outcome == table()[damage][name]


def test_the_table_has_all_damages() -> None:
    assert {damage: [*row] for damage, row in table().items()} == {damage: [*FORMATS, "here"] for damage in DAMAGES}
    assert {row["here"] for row in table().values()} == {"an error that names file and tensor"}
