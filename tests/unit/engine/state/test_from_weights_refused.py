"""Weights to start from that do not fit, cannot be read, or change in the midst: told at once, by every rank."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import Kind, build, train
from tests.unit.engine.parts import alone
from tests.unit.engine.state.weight_files import (
    HARD,
    Tensors,
    assert_holds,
    assert_refused_alike,
    plain,
    saved,
    tensors_of,
)
from zerotrain.checkpoint.folder import PartialFolder, step_name
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.comm.world import World
from zerotrain.engine.state import from_weights as files
from zerotrain.errors import CheckpointError, EngineStateError


def changed(tensors: Tensors, changes: Mapping[str, torch.Tensor | None]) -> Tensors:
    return {name: value for name, value in (tensors | dict(changes)).items() if value is not None}


MISFITS = {
    "blocks.0.weight": None,
    "blocks.0.wieght": torch.zeros(24, 24),
    "odd": torch.zeros(15, 7),
    "norm.bias": None,
    "one": torch.ones((), dtype=torch.int32),
    "head": torch.ones(2),
    "scaled": torch.ones(2).to(torch.float8_e4m3fn),
}


@pytest.mark.case(
    "checkpoints",
    "that do not fit",
    "all misfits at once, on every rank, before anything changes; `strict=False` loads the rest",
    under="weights out of a safetensors file",
)
def test_all_that_does_not_fit_is_told_at_once_on_every_rank_and_nothing_has_changed(tmp_path: Path) -> None:
    path = saved(changed(tensors_of(plain(HARD, 7)), MISFITS), tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> str:
        engine = build(world, HARD, 2, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError) as error:
            engine.load_weights(path)
        assert engine.weights_sha256() == before
        train(engine, 0)
        return str(error.value)

    told = run_threads(on_a_rank, 3)[0]
    assert told == [told[0]] * 3
    assert told[0].replace(f"{path} does not fit the engine: ", "").splitlines() == [
        "it lacks norm.bias, blocks.0.weight (is it blocks.0.wieght?); or give strict=False",
        "the model has no blocks.0.wieght (is it blocks.0.weight?), head, scaled; or give strict=False",
        "odd is of shape (15, 7) in it, and of shape (7, 15) in the model",
        "one is I32 in it, and bfloat16 in the model",
    ]


@pytest.mark.case("checkpoints", "that do not fit", under="weights out of a safetensors file")
@pytest.mark.parametrize("stage", range(4))
def test_not_strict_it_takes_what_fits_and_tells_what_did_not(stage: int, tmp_path: Path) -> None:
    tensors = changed(tensors_of(plain(HARD, 7)), MISFITS)
    path = saved(tensors, tmp_path / "weights.safetensors")
    own = tensors_of(plain(HARD, 1))

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, stage, seed=1)
        loaded = engine.load_weights(path, strict=False)
        assert {*loaded.missing} == {"norm.bias", "blocks.0.weight"}
        assert {*loaded.surplus} == {"blocks.0.wieght", "head", "scaled"}
        assert [said.split()[0] for said in (*loaded.wrong_shape, *loaded.wrong_dtype)] == ["odd", "one"]
        assert [line.split(":")[0] for line in loaded.told()[1:]] == [
            "2 not in it, and left as they are",
            "3 in it, and not in the model",
            "1 of another shape, and left as they are",
            "1 of another kind, and left as they are",
        ]
        left = ("norm.bias", "blocks.0.weight", "odd", "one")
        kept, taken = {name: own[name] for name in left}, {name: tensors[name] for name in own if name not in left}
        assert_holds(engine, HARD, kept | taken)
        train(engine, 0)

    run_threads(on_a_rank, 2)


def test_a_tied_tensor_may_lie_there_under_all_its_names_if_they_are_the_same(tmp_path: Path) -> None:
    """By five ranks: the 888 elements cannot be shared out evenly."""
    tensors = tensors_of(plain(HARD, 7))
    twice = tensors | {"output.weight": tensors["embedding.weight"].clone()}
    last_differs = tensors["embedding.weight"].clone()
    last_differs[-1, -1] += 1
    other = tensors | {"output.weight": last_differs}
    same, different = saved(twice, tmp_path / "same.safetensors"), saved(other, tmp_path / "other.safetensors")

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, 3, seed=1)
        before = engine.weights_sha256()
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=r"embedding\.weight and output\.weight are one tensor"):
                engine.load_weights(different, strict=strict)
        assert engine.weights_sha256() == before
        engine.load_weights(same)
        assert_holds(engine, HARD, tensors)

    run_threads(on_a_rank, 5)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def other_shape(path: Path) -> Path:
    """A file whose header gives a tensor another shape, of as many elements less seven."""
    content = path.read_bytes()
    assert content.count(b"[7,15]") == 1
    return written(path, content.replace(b"[7,15]", b"[7,14]"))


def without_a_file(folder: Path) -> Path:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def index(folder: Path, places: Any) -> Path:
    return written(folder / "model.safetensors.index.json", json.dumps({"weight_map": places}).encode()).parent


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


FIRST = "model-00001-of-00002.safetensors"
# Made of a folder `at` in which are `file`, a folder `two` with an index, and one that is `empty`.
UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "not there": (lambda at: at / "nowhere", r"nowhere is not there: give a file of safetensors or torch\.s"),
    "cut": (lambda at: written(at / "f", (at / "file").read_bytes()[:-1]), r"f is cut: \d+ bytes, and its header say"),
    "longer": (lambda at: written(at / "f", (at / "file").read_bytes() + b"0"), "f is longer than its header says"),
    "empty": (lambda at: written(at / "f", b""), r"f is neither a file of safetensors nor of torch\.save \(0 b"),
    "no JSON": (lambda at: written(at / "f", b"\2\0\0\0\0\0\0\0{["), "is no safetensors file, or damaged in its hea"),
    "shapes": (lambda at: other_shape(at / "file"), "gives odd a place where it cannot be"),
    "git LFS": (lambda at: written(at / "f", b"version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    "a pipe": (lambda at: pipe(at / "f"), "f cannot be read: it is a FIFO, and must be a reg"),
    "an empty folder": (lambda at: at / "empty", "empty has no checkpoint in it: give a file of safetensors or"),
    "a cut save": (lambda at: PartialFolder(at / "empty" / step_name(1)).path.parent, "only a save that was cut off"),
    "a file missing": (lambda at: without_a_file(at / "two"), r"two lacks model-00002\S+ of the 2 files that model\.s"),
    "an index of others": (
        lambda at: index(at / "two", {"head": FIRST}),
        f"{FIRST} has no head, which its index lists",
    ),
    "an index that leads away": (lambda at: index(at / "two", {"odd": "../file"}), "json is no index of files with we"),
}


@pytest.mark.case(
    "checkpoints",
    "cut, damaged, missing, of another kind",
    "one sentence on every rank",
    under="weights out of a safetensors file",
)
@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_one_sentence_on_every_rank(case: str, source: Path, tmp_path: Path) -> None:
    make, said = UNREADABLE[case]
    shutil.copy(source / "any name.st", tmp_path / "file")
    shutil.copytree(source / "two", tmp_path / "two")
    (tmp_path / "empty").mkdir()
    path = make(tmp_path)

    assert_refused_alike(path, HARD, said)


class Wide(nn.Module):
    """With a weight and a buffer that share no block of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 1024, bias=False)
        self.register_buffer("table", torch.zeros(512, 1024))


@pytest.mark.parametrize(("role", "name"), [("weight", "linear.weight"), ("buffer", "table")])
def test_a_flipped_byte_of_a_checkpoints_weights_or_buffers_is_refused_before_anything_has_changed(
    role: str, name: str, tmp_path: Path
) -> None:
    path = build(alone(), Kind(Wide), 2).save(tmp_path / "step")
    [piece] = next(tensor.pieces for of, _, tensor in read_manifest(path).tensors() if of == name)
    content = bytearray((path / "rank-00000.safetensors").read_bytes())
    content[piece.byte + 2**20 + 4] ^= 1
    (path / "rank-00000.safetensors").write_bytes(content)

    def on_a_rank(world: World) -> None:
        engine = build(world, Kind(Wide), 3, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=rf"safetensors is not what was written: .*{role} of {name}"):
            engine.load_weights(path)
        assert engine.weights_sha256() == before

    run_threads(on_a_rank, 2)


def test_ranks_that_see_different_files_refuse_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(plain(HARD, 7))
    path = saved(tensors, tmp_path / "weights.safetensors")
    newer = saved(tensors | {"more": torch.ones(1)}, tmp_path / "newer.safetensors")
    real, here = files.find_weights, threading.local()
    here.rank = 0

    def find(source: Path, **how: Any) -> Any:
        return real(newer if here.rank == 1 else source, **how)  # as where each machine has a disk of its own

    monkeypatch.setattr(files, "find_weights", find)

    def on_a_rank(world: World) -> None:
        here.rank = world.rank
        engine = build(world, HARD, 2)
        with pytest.raises(CheckpointError, match=r"is another on rank 1 than on rank 0"):
            engine.load_weights(path)

    run_threads(on_a_rank, 2)


@pytest.mark.case("checkpoints", "a file that changes, or a disk that fails, in the midst of a load")
def test_a_disk_that_fails_in_the_midst_leaves_an_engine_that_trains_when_it_is_whole_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = os.preadv, source / "any name.st"
    one = saved({"one": torch.tensor(5.0)}, source / "one.safetensors")
    data_start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    fails = threading.local()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if getattr(fails, "now", False) and offset > data_start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, 2, seed=1)
        loss = engine(torch.arange(9))
        fails.now = world.rank == 1
        with pytest.raises(CheckpointError, match=r"rank 1: .+ name\.st cannot be read: Input/output error; the eng"):
            engine.load_weights(path)
        fails.now = False
        with pytest.raises(EngineStateError, match="computed before"):
            engine.backward(loss)
        for use in (lambda: engine(torch.arange(9)), lambda: engine.save(source / "half")):
            with pytest.raises(EngineStateError, match="failed halfway, and the engine holds a part of it"):
                use()
        engine.load_weights(one, strict=False)
        with pytest.raises(EngineStateError, match=r"name\.st failed halfway"):
            engine(torch.arange(9))
        engine.load_weights(path)
        assert_holds(engine, HARD, load_file(path))
        train(engine, 0)

    run_threads(on_a_rank, 2)
