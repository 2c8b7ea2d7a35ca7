"""A checkpoint that is not what was written is found on every rank, named, and changes nothing."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, Kind, build, saved_by_two_ranks, train
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.manifest import Manifest, read_manifest
from zerotrain.engine.state import from_checkpoint as checkpoint
from zerotrain.errors import CheckpointError

KIND = KINDS["hard parameters, bf16, momentum"]
MANIFEST, FIRST, SECOND = "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_two_ranks(tmp_path_factory.mktemp("checkpoints") / "step", KIND)


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "step"))


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def refused(path: Path, said: str) -> None:
    """By `verify`, and by every rank of an engine, which stays as it is."""
    with pytest.raises(CheckpointError, match=said):
        verify(path)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, KIND, 3, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=said):
            engine.load(path)
        assert engine.weights_sha256() == before
        assert engine.stamps.num_steps == 0
        train(engine, 0)

    run_threads(on_a_rank, 3)


def places(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """A file and a byte in it, of each kind of thing that is saved."""
    found = {"header": (FIRST, 30), "length of the header": (SECOND, 0)}
    for name, role, tensor in manifest.tensors():
        for piece in tensor.pieces[:1]:
            found[f"{role} of {name}"] = manifest.files[piece.file].name, piece.byte
    return found


@pytest.mark.case("checkpoints", "a file or the manifest damaged")
def test_a_flipped_byte_is_found_wherever_it_lies_and_file_and_tensor_are_named(whole: Path, damaged: Path) -> None:
    found = places(read_manifest(whole))
    assert {"weight of blocks.1.weight", "momentum_buffer of turned", "buffer of norm.running_var"} < found.keys()
    for label, (file, byte) in found.items():
        flip(damaged / file, byte)
        with pytest.raises(CheckpointError) as caught:
            verify(damaged)
        assert f"{file} is not what was written: bytes 0 to " in str(caught.value), label
        flip(damaged / file, byte)
    verify(damaged)


def test_the_tensor_of_a_flipped_byte_is_named_where_a_block_is_its_own(tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 512, bias=False) for _ in range(3))

    kind = Kind(Wide, functools.partial(torch.optim.SGD, lr=0.1))
    run_threads(lambda world: build(world, kind, 2).save(tmp_path / "step"), 1)
    flip(tmp_path / "step" / FIRST, 5 * 2**20 + 4)
    with pytest.raises(CheckpointError, match=r"bytes 5242880 to 6291456 are others \(weight of blocks\.2\.weight\)$"):
        verify(tmp_path / "step")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a tensor": (lambda path: flip(path / SECOND, 9000), f"{SECOND} is not what was written: bytes 0 to"),
    "a file cut": (
        lambda path: (path / FIRST).write_bytes((path / FIRST).read_bytes()[:-4]),
        rf"{FIRST} is cut: \d+ bytes, and \d+ were written \(\S+ of \S+\)",
    ),
    "a file longer": (lambda path: (path / FIRST).open("ab").write(b"more"), f"{FIRST} is longer than what was"),
    "a file removed": (lambda path: (path / SECOND).unlink(), rf"{SECOND} is missing \(\S+ of "),
    "the manifest edited": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"step": 1', '"step": 2')),
        f"{MANIFEST} is not what was written: it was edited or damaged",
    ),
    "the manifest cut": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text()[:-90]),
        f"{MANIFEST} is damaged: it is no JSON",
    ),
    "the manifest of something else": (
        lambda path: (path / MANIFEST).write_text("[]"),
        f"{MANIFEST} is no manifest of a zerotrain checkpoint",
    ),
    "an unknown version": (
        lambda path: (path / MANIFEST).write_text(
            json.dumps({**json.loads((path / MANIFEST).read_text()), "format_version": 7})
        ),
        "has format version 7, and this zerotrain reads version 1",
    ),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"is no checkpoint: it has no {MANIFEST}"),
    "no folder": (shutil.rmtree, "is no checkpoint: it is no folder"),
}


@pytest.mark.case(
    "checkpoints",
    "a file or the manifest damaged",
    "a byte flipped, a file cut, longer, removed, swapped, of another save, the manifest edited, cut, of another "
    "version: refused on all ranks, file and tensor named; nothing has changed",
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_damaged_is_refused_by_all_ranks_before_anything_has_changed(damage: str, damaged: Path) -> None:
    harm, said = DAMAGES[damage]
    harm(damaged)
    refused(damaged, said)


@pytest.mark.case("checkpoints", "a file or the manifest damaged")
def test_files_of_one_size_that_were_swapped_are_told_apart(tmp_path: Path) -> None:
    """With as many bytes in both, only what is in them can tell."""

    kind = Kind(lambda: torch.nn.Linear(16, 8, bias=False), functools.partial(torch.optim.SGD, lr=0.1))
    run_threads(lambda world: build(world, kind, 2).save(tmp_path / "step"), 2)
    manifest = read_manifest(tmp_path / "step")
    assert manifest.files[0].nbytes == manifest.files[1].nbytes
    (tmp_path / "step" / FIRST).rename(tmp_path / "kept")
    (tmp_path / "step" / SECOND).rename(tmp_path / "step" / FIRST)
    (tmp_path / "kept").rename(tmp_path / "step" / SECOND)
    with pytest.raises(CheckpointError, match=f"they are those of {SECOND}: were the two swapped"):
        verify(tmp_path / "step")


def test_another_save_of_the_same_state_is_no_replacement_for_a_file(whole: Path, damaged: Path) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, KIND, 2)
        train(engine, 0)
        engine.save(damaged.parent / "again", extra={"rows": 9})

    run_threads(save, 2)
    shutil.copy(damaged.parent / "again" / FIRST, damaged / FIRST)
    refused(damaged, f"{FIRST} is not what was written")


@pytest.mark.case(
    "checkpoints",
    "a file that changes, or a disk that fails, in the midst of a load",
    "the engine computes and saves nothing until a load succeeds",
)
def test_a_file_that_changes_between_the_two_looks_is_found_by_the_second(
    whole: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "problems_in", lambda *_: [])
    flip(damaged / SECOND, 9000)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, KIND, 1)
        train(engine, 0)  # its gathers are under way
        with pytest.raises(
            CheckpointError, match=f"rank 1: \\S+{SECOND} is not what was written.*load one that can be"
        ):
            engine.load(damaged)
        said = r"loading \S+ failed halfway, and the engine holds a part of it: first load one that can be read"
        for use in (lambda: train(engine, 0), lambda: engine.save(damaged.with_name("next"))):
            with pytest.raises(zerotrain.EngineStateError, match=said):
                use()
        engine.load_weights(whole)  # of the optimizer's state still a half is another's
        with pytest.raises(zerotrain.EngineStateError, match=said):
            train(engine, 0)
        engine.load(whole)
        train(engine, 0)

    run_threads(on_a_rank, 2)


@pytest.mark.parametrize("name", [FIRST, SECOND, MANIFEST])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_nobody_waits(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    os.mkfifo(damaged / name)
    refused(damaged, f"{name} cannot be read: it is a FIFO, and must be a regular file")
