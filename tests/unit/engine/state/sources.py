"""Weights in files, of which engines begin, and what they hold then."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import zerotrain
from tests.unit.checkpoint.runs import KINDS, SCALED, Kind, Matrices, build, train
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.kept import step_name
from zerotrain.comm.world import World
from zerotrain.testing.fake_wire import run_threads

HARD = KINDS["hard parameters, bf16, momentum"]
MODELS: dict[str, Kind] = {
    "tied, frozen, odd, turned": KINDS["hard parameters, AdamW"],
    "the same in bf16": HARD,
    "fp16": Kind(Matrices, precision=SCALED),
    "Muon": KINDS["Muon and AdamW"],
    "adapters on a frozen base in bf16": KINDS["a frozen base in bf16 with adapters"],
}
PLACES = [(stage, size) for stage in range(4) for size in (1, 2, 3)]
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
