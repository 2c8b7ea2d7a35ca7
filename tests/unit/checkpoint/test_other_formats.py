"""What damage does to checkpoints of torch and to ours: the table of docs/reference/checkpoint_promises.md, by cell."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.unit.checkpoint.runs import ADAMW, Kind, build
from zerotrain.comm.world import World
from zerotrain.errors import CheckpointError
from zerotrain.testing.fake_wire import run_threads

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "checkpoint_promises.md"
NUMEL = 4096


def original() -> dict[str, torch.Tensor]:
    return {"first": torch.arange(NUMEL, dtype=torch.float32), "second": -torch.arange(NUMEL, dtype=torch.float32)}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in original().items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.first + self.second).sum()


KIND = Kind(Two, ADAMW)
Tensors = dict[str, torch.Tensor]


class Dcp:
    """torch.distributed.checkpoint, each tensor in a file of its own, as tensors of several ranks are."""

    def save(self, folder: Path) -> None:
        dcp.save(original(), storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)

    def load(self, folder: Path) -> Tensors:
        loaded = {name: torch.zeros(NUMEL) for name in original()}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        return loaded

    def files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.distcp"))


class TorchSave:
    """A file for each rank by torch.save."""

    def save(self, folder: Path) -> None:
        for name, value in original().items():
            torch.save({"values": value}, folder / f"{name}.pt")

    def load(self, folder: Path) -> Tensors:
        return {name: torch.load(folder / f"{name}.pt")["values"] for name in original()}

    def files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.pt"))


class Ours:
    def save(self, folder: Path) -> None:
        folder.rmdir()

        def on_a_rank(world: World) -> None:
            build(world, KIND, 2, bucket_mb=1).save(folder)

        run_threads(on_a_rank, 2)

    def load(self, folder: Path) -> Tensors:
        def on_a_rank(world: World) -> Tensors:
            engine = build(world, KIND, 2, bucket_mb=1)
            engine.load_state_dict({name: torch.zeros(NUMEL) for name in original()})
            engine.load(folder)
            return engine.full_state_dict()

        return run_threads(on_a_rank, 2)[0][0]

    def files(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("*.safetensors"))


FORMATS = {"DCP": Dcp(), "torch.save": TorchSave(), "here": Ours()}


def flip(files: list[Path]) -> None:
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 1
    files[1].write_bytes(content)


def cut(files: list[Path]) -> None:
    os.truncate(files[1], files[1].stat().st_size // 2)


def swap(files: list[Path]) -> None:
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "a byte of a tensor flipped": flip,
    "a file cut": cut,
    "a file removed": lambda files: files[1].unlink(),
    "two files swapped": swap,
}
LOADED, TOLD, NAMED = "loaded without a word", "an error", "an error that names file and tensor"


def outcome(name: str, damage: str, folder: Path) -> str:
    files_of = FORMATS[name]
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP: that there is one process
        files_of.save(folder)
        assert all(torch.equal(value, original()[key]) for key, value in files_of.load(folder).items())
        files = files_of.files(folder)
        assert len(files) == 2
        DAMAGES[damage](files)
        try:
            loaded = files_of.load(folder)
        except CheckpointError as error:
            return NAMED if re.search(r"rank-0000[01]\.safetensors .*(first|second)", str(error)) else TOLD
        except (Exception, dcp.api.CheckpointException):  # DCP's own is no Exception
            return TOLD
    assert any(not torch.equal(value, original()[key]) for key, value in loaded.items())
    return LOADED


def table() -> dict[str, dict[str, str]]:
    lines = DOCS.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| damage |"))
    names, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[start : start + 6]]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_damage_does_is_what_the_docs_say(damage: str, name: str, tmp_path: Path) -> None:
    """Should a cell for torch fail one day, the docs are to be mended."""
    assert outcome(name, damage, tmp_path / "saved") == table()[damage][name]


def test_the_table_has_all_damages_and_formats() -> None:
    assert {damage: [*row] for damage, row in table().items()} == {damage: [*FORMATS] for damage in DAMAGES}
