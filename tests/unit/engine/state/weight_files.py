"""Weights in files, of which engines begin, and what they hold then."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, SCALED, Kind, Matrices, build, train
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.folder import step_name
from zerotrain.comm.world import World
from zerotrain.errors import CheckpointError

HARD = KINDS["hard parameters, bf16, momentum"]
MODELS: dict[str, Kind] = {
    "tied, frozen, odd, turned": KINDS["hard parameters, AdamW"],
    "the same in bf16": HARD,
    "fp16": Kind(Matrices, precision=SCALED),
    "Muon": KINDS["Muon and AdamW"],
    "adapters on a frozen base in bf16": KINDS["a frozen base in bf16 with adapters"],
}


def some_places(number: int) -> list[tuple[int, int]]:
    """Each stage once, and each number of ranks; cases with three numbers in a row have all placements together."""
    return [(stage, 1 + (stage + number) % 3) for stage in range(4)]


Tensors = dict[str, torch.Tensor]


def plain(kind: Kind, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind.model()


def tensors_of(model: nn.Module, dtype: torch.dtype | None = None) -> Tensors:
    """Of `model.state_dict()` what a safetensors file can hold: dense, and of a tied tensor one name."""
    found: Tensors = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach().clone(memory_format=torch.contiguous_format)
            if dtype is not None and value.is_floating_point():
                found[name] = found[name].to(dtype)
    return found


def saved(tensors: Tensors, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


def assert_holds(engine: zerotrain.ZeroEngine, kind: Kind, state: Tensors) -> None:
    """What plain PyTorch makes of the same numbers, in the dtype the engine keeps each parameter in. Collective."""
    got = engine.full_state_dict()
    if engine.world.rank > 0:
        return
    reference = plain(kind, 1)
    reference.load_state_dict(state, strict=False)
    frozen = [bucket for bucket in engine.schedule.buckets if bucket not in engine.schedule.trained]
    kept = {managed.names[0]: bucket.spec.dtype for bucket in frozen for managed in bucket.spec.parameters}
    expected = {
        name: value.detach().to(kept.get(name, value.dtype)).to(value.dtype)
        for name, value in reference.state_dict(keep_vars=True).items()
    }
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def trained_run(folder: Path, kind: Kind = HARD, stage: int = 2, size: int = 3) -> Tensors:
    """The folder of a run with two checkpoints; returns what the newest holds."""

    def on_a_rank(world: World) -> dict[str, Any]:
        engine = build(world, kind, stage, seed=7)
        for step in (1, 2):
            train(engine, step, of_rank=world.rank)
            engine.save(folder / "checkpoints" / step_name(step))
        return engine.full_state_dict()

    return run_threads(on_a_rank, size)[0][0]


def every_form(folder: Path) -> Path:
    """Fills a folder with every form in which the same weights may lie."""
    tensors = tensors_of(plain(HARD, 7))
    saved(tensors, folder / "any name.st")
    saved(tensors, folder / "one" / "model.safetensors")
    names, files = list(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, (names[:5], names[5:]), strict=True):
        saved({name: tensors[name] for name in part}, folder / "two" / file)
    places = {name: files[at >= 5] for at, name in enumerate(names)}
    (folder / "two" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    engine = build(alone(), HARD, 0, seed=7)
    for step in (9, 10):
        if step == 10:
            engine.load_weights(folder / "any name.st")
        engine.save(folder / "run" / "checkpoints" / step_name(step))
        train(engine, 0)
    return folder


def load_at_some_places(path: Path, kind: Kind, state: Tensors, number: int) -> list[str]:
    """Engines at each stage come to hold these and train on, alike on all ranks; returns what they say of the load."""

    def on_a_rank(world: World, stage: int) -> tuple[str, list[str]]:
        engine = build(world, kind, stage, seed=1)
        loaded = engine.load_weights(path)
        assert (loaded.missing, loaded.surplus, loaded.wrong_shape, loaded.wrong_dtype) == ((), (), (), ())
        assert_holds(engine, kind, state)
        train(engine, 0)
        return engine.weights_sha256(), loaded.told()

    said = []
    for stage, size in some_places(number):
        results, _ = run_threads(lambda world, stage=stage: on_a_rank(world, stage), size, late_rank=size - 1)
        assert len({sha256 for sha256, _ in results}) == 1
        said += [lines for _, lines in results]
    assert all(lines == said[0] for lines in said)
    return said[0]


def assert_loaded_whole(path: Path, kind: Kind, state: Tensors) -> None:
    """Three ranks come to hold these, at both ends of the stages."""

    def on_a_rank(world: World, stage: int) -> None:
        engine = build(world, kind, stage, seed=1)
        engine.load_weights(path)
        assert_holds(engine, kind, state)

    for stage in (0, 3):
        run_threads(lambda world, stage=stage: on_a_rank(world, stage), 3)


def assert_refused_alike(path: Path, kind: Kind, said: str) -> None:
    """Two ranks refuse to load it, with the same one sentence, and nothing has changed."""

    def on_a_rank(world: World) -> str:
        engine = build(world, kind, 2, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=said) as error:
            engine.load_weights(path)
        assert engine.weights_sha256() == before
        return str(error.value)

    told = run_threads(on_a_rank, 2)[0]
    assert told == [told[0]] * 2
    assert "\n" not in told[0]


def nbytes_read(path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By each of three ranks at stage 3 that load it."""
    num_read: dict[int, int] = {}
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        num_read[threading.get_ident()] = num_read.get(threading.get_ident(), 0) + count
        return count

    def on_a_rank(world: World) -> int:
        engine = build(world, kind, 3, seed=1)
        num_read[threading.get_ident()] = 0
        engine.load_weights(path)
        return num_read[threading.get_ident()]

    monkeypatch.setattr(os, "preadv", preadv)
    found: list[int] = run_threads(on_a_rank, 3)[0]
    return found
