"""Weights to start from: out of files of anybody's and checkpoints of ours, into the shards of any stage."""

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
from safetensors.torch import load_file, save_file
from torch import nn

import zerotrain
from tests.unit.checkpoint.runs import KINDS, SCALED, Kind, Matrices, build, counted, held, train
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.checkpoint.kept import step_name
from zerotrain.checkpoint.manifest import pieces_of, read_manifest
from zerotrain.comm.world import World
from zerotrain.engine.state import start
from zerotrain.errors import CheckpointError, ConfigError, EngineStateError
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_loaded_at_any_placement_as_plain_pytorch_loads_it(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kind = MODELS[name]
    path = saved(tensors_of(plain(kind, 7), dtype), tmp_path / "weights.safetensors")
    state = load_file(path)

    def on_a_rank(world: World, stage: int) -> str:
        engine = build(world, kind, stage, seed=1)
        loaded = engine.load_weights(path)
        assert (loaded.missing, loaded.surplus, loaded.wrong_shape, loaded.wrong_dtype) == ((), (), (), ())
        assert loaded.told() == [f"{len(state)} tensors loaded from {path}"]
        assert_holds(engine, kind, state)
        train(engine, 0)
        return engine.weights_sha256()

    for stage, size in PLACES:
        results, _ = run_threads(lambda world, stage=stage: on_a_rank(world, stage), size, late_rank=size - 1)
        assert len({*results}) == 1


def test_what_was_loaded_trains_as_what_load_state_dict_was_given(tmp_path: Path) -> None:
    path = saved(tensors_of(plain(HARD, 7)), tmp_path / "weights.safetensors")
    state = load_file(path)

    def on_a_rank(world: World, stage: int) -> tuple[str, str]:
        one, other = (build(world, HARD, stage, seed=seed) for seed in (1, 2))
        one.load_weights(path)
        other.load_state_dict(state)
        for engine in (one, other):
            train(engine, 0, 1)
        return one.weights_sha256(), other.weights_sha256()

    for stage, size in PLACES:
        results, _ = run_threads(lambda world, stage=stage: on_a_rank(world, stage), size)
        assert len({each for pair in results for each in pair}) == 1


def test_a_model_whose_parameters_were_never_whole_is_filled(tmp_path: Path) -> None:
    kind = KINDS["Muon and AdamW"]
    path = saved(tensors_of(plain(kind, 7)), tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> None:
        zero = zerotrain.ZeroConfig(stage=3, bucket_mb=0.004)
        engine = zerotrain.build_engine(kind.model, optimizer=kind.optimizer, zero=zero, world=world)
        engine.load_weights(path)
        assert_holds(engine, kind, load_file(path))

    run_threads(on_a_rank, 2)


@pytest.mark.parametrize("stage", range(4))
def test_the_optimizer_goes_on_with_what_it_has_kept(stage: int, tmp_path: Path) -> None:
    kind = KINDS["Muon and AdamW, bf16"]
    path = saved(tensors_of(plain(kind, 7)), tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> None:
        engine = build(world, kind, stage)
        train(engine, 0, 1)
        before, counts = held(engine), counted(engine)
        engine.load_weights(path)
        for (name, role, _, old), (_, _, _, new) in zip(before, held(engine), strict=True):
            assert torch.equal(old, new) is (role != "weight"), (name, role)
        counts.pop("buffers")
        assert {key: each for key, each in counted(engine).items() if key != "buffers"} == counts
        train(engine, 2)

    run_threads(on_a_rank, 2)


def trained_run(folder: Path, kind: Kind = HARD, stage: int = 2, size: int = 3) -> Tensors:
    """The folder of a run with two checkpoints; returns what the newest holds."""

    def on_a_rank(world: World) -> dict[str, Any]:
        engine = build(world, kind, stage, seed=7)
        for step in (1, 2):
            train(engine, step, of_rank=world.rank)
            engine.save(folder / "checkpoints" / step_name(step))
        return engine.full_state_dict()

    return run_threads(on_a_rank, size)[0][0]


@pytest.mark.parametrize("name", ["tied, frozen, odd, turned", "the same in bf16", "Muon"])
def test_weights_alone_are_taken_from_a_checkpoint_of_any_placement(name: str, tmp_path: Path) -> None:
    kind = MODELS[name]
    state = trained_run(tmp_path, kind)

    def on_a_rank(world: World, stage: int) -> None:
        engine = build(world, kind, stage, seed=1)
        loaded = engine.load_weights(tmp_path)
        assert loaded.path == tmp_path / "checkpoints" / step_name(2)
        assert engine.stamps.num_steps == 0
        assert all(role == "weight" for _, role, _, _ in held(engine))
        assert_holds(engine, kind, state)

    for stage, size in PLACES:
        run_threads(lambda world, stage=stage: on_a_rank(world, stage), size)


def test_a_checkpoint_of_other_strides_and_of_another_optimizer_is_taken_too(tmp_path: Path) -> None:
    class Straight(HARD.model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(self.turned.detach().contiguous())

    state = trained_run(tmp_path, Kind(Straight))

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, 3, seed=1)
        engine.load_weights(tmp_path)
        assert_holds(engine, HARD, state)

    run_threads(on_a_rank, 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every form in which the same weights may lie."""
    folder, tensors = tmp_path_factory.mktemp("source"), tensors_of(plain(HARD, 7))
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


FORMS = ["any name.st", "one", "one/model.safetensors", "two", "two/model.safetensors.index.json", "run"]
FORMS += ["run/checkpoints", f"run/checkpoints/{step_name(10)}"]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_weights_lie_in_many_forms(form: str, source: Path) -> None:
    engine = build(alone(), HARD, 2, seed=1)
    engine.load_weights(str(source / form))
    assert_holds(engine, HARD, load_file(source / "any name.st"))


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {rename(name): value for name, value in tensors.items()}


class Around(nn.Module):
    """As a class of one's own around a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"inner": Matrices()})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model["inner"](tokens)


@pytest.mark.parametrize(
    ("before", "made", "said"),
    [
        ("module.", Matrices, "all names in it begin with 'module.', which was left out"),
        ("_orig_mod.", Matrices, "all names in it begin with '_orig_mod.', which was left out"),
        ("module._orig_mod.", Matrices, "all names in it begin with 'module._orig_mod.', which was left out"),
        ("", Around, "all names of the model begin with 'model.inner.', which was put before those in it"),
    ],
    ids=["DDP", "compiled", "both", "a class around the model"],
)
def test_a_word_before_all_names_is_no_hindrance_and_is_told(
    before: str, made: type[nn.Module], said: str, tmp_path: Path
) -> None:
    tensors = tensors_of(plain(Kind(Matrices), 7))
    path = saved({before + name: value for name, value in tensors.items()}, tmp_path / "weights.safetensors")
    engine = build(alone(), Kind(made), 2, seed=1)
    loaded = engine.load_weights(path)
    assert loaded.told() == [f"{len(tensors)} tensors loaded from {path}; {said}"]
    own = "model.inner." if made is Around else ""
    assert_holds(engine, Kind(made), {own + name: value for name, value in tensors.items()})


def test_names_that_hooks_of_the_state_dict_give_are_known_beside_those_of_modules(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        """Calls its weight a kernel where its state is saved and loaded."""

        def __init__(self) -> None:
            super().__init__(24, 24)
            self.register_state_dict_post_hook(self.rename)
            self.register_load_state_dict_pre_hook(self.rename_back)

        @staticmethod
        def rename(module: nn.Module, state: Tensors, prefix: str, _: Any) -> None:
            state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

        @staticmethod
        def rename_back(module: nn.Module, state: Tensors, prefix: str, *_: Any) -> None:
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    class Hooked(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = Renamed()
            self.blocks[1] = Renamed()

    kind = Kind(Hooked)
    tensors = tensors_of(plain(kind, 7))
    assert {"blocks.0.kernel", "blocks.1.kernel"} <= tensors.keys()
    tensors["blocks.1.weight"] = tensors.pop("blocks.1.kernel")
    path = saved(tensors, tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> None:
        engine = build(world, kind, 3, seed=1)
        engine.load_weights(path)
        assert_holds(engine, kind, tensors)

    run_threads(on_a_rank, 2)


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
        "it lacks norm.bias, blocks.0.weight (is it blocks.0.wieght?); or say strict=False",
        "the model has no blocks.0.wieght (is it blocks.0.weight?), head, scaled; or say strict=False",
        "odd is of shape (15, 7) in it, and of shape (7, 15) in the model",
        "one is I32 in it, and bfloat16 in the model",
    ]


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


@pytest.mark.parametrize("stage", range(4))
def test_what_the_file_has_not_keeps_what_was_written_into_it_in_place(stage: int, tmp_path: Path) -> None:
    path = saved({"one": torch.tensor(5.0)}, tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, stage)
        with torch.no_grad(), engine.forward_scope():
            engine.module.odd.fill_(0.25)
            engine.module.blocks[1].weight.fill_(0.5)
        engine.load_weights(path, strict=False)
        got = engine.full_state_dict()
        if world.rank == 0:
            assert [got[name].unique().item() for name in ("one", "odd", "blocks.1.weight")] == [5, 0.25, 0.5]

    run_threads(on_a_rank, 2)


def test_a_tied_tensor_may_lie_there_under_all_its_names_if_they_are_the_same(tmp_path: Path) -> None:
    tensors = tensors_of(plain(HARD, 7))
    twice = tensors | {"output.weight": tensors["embedding.weight"].clone()}
    other = tensors | {"output.weight": tensors["embedding.weight"] + 1}
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

    run_threads(on_a_rank, 2)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def header(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A file whose header was changed."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    told = json.loads(content[8 : 8 + length])
    change(told)
    text = json.dumps(told).encode()
    return written(path, len(text).to_bytes(8, "little") + text + content[8 + length :])


def pickled(path: Path, **how: Any) -> Path:
    torch.save({"weight": torch.ones(3)}, path, **how)
    return path


def without_a_file(folder: Path) -> Path:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def index(folder: Path, places: Any) -> Path:
    return written(folder / "model.safetensors.index.json", json.dumps({"weight_map": places}).encode()).parent


def of_pickles(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")
    return folder / "pytorch_model.bin.index.json"


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path) -> Path:
    path.symlink_to("nowhere")
    return path


FIRST = "model-00001-of-00002.safetensors"
# Made of a folder `at` in which are `file`, a folder `two` with an index, and one that is `empty`.
UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "not there": (lambda at: at / "nowhere", r"nowhere is not there: give a safetensors file, a folder with model\."),
    "cut": (lambda at: written(at / "f", (at / "file").read_bytes()[:-1]), r"f is cut: \d+ bytes, and its header tel"),
    "cut in its header": (lambda at: written(at / "f", (at / "file").read_bytes()[:99]), r"f is cut: 99 bytes, and i"),
    "longer": (lambda at: written(at / "f", (at / "file").read_bytes() + b"0"), "f is longer than what its header"),
    "empty": (lambda at: written(at / "f", b""), r"f is no safetensors file \(0 bytes\)"),
    "text": (lambda at: written(at / "f", b"weights: none\n" * 9), "f is no safetensors file"),
    "no JSON": (lambda at: written(at / "f", b"\2\0\0\0\0\0\0\0{["), "is no safetensors file, or damaged in its hea"),
    "other JSON": (lambda at: written(at / "f", b'\x09\0\0\0\0\0\0\0{"a": 12}'), "damaged in its header"),
    "shapes": (lambda at: header(at / "file", lambda told: told["odd"].update(shape=[7, 14])), "header odd lies where"),
    "a hole": (lambda at: header(at / "file", lambda told: told.pop("odd")), "lies where it cannot lie"),
    "a pickle": (lambda at: pickled(at / "model.safetensors.pt"), "is a pickle, as torch.save writes it"),
    "an old pickle": (lambda at: pickled(at / "f", _use_new_zipfile_serialization=False), "is a pickle, as torch.save"),
    "a folder of pickles": (lambda at: pickled(at / "empty" / "pytorch_model.bin").parent, "bin is pickled, and load"),
    "an index of pickles": (lambda at: of_pickles(at / "two"), "bin.index.json is pickled, and loading a pickle may"),
    "git LFS": (lambda at: written(at / "f", b"version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    "a pipe": (lambda at: pipe(at / "f"), "f is no file"),
    "a link that leads nowhere": (lambda at: link(at / "f"), "f is no file"),
    "an empty folder": (lambda at: at / "empty", "empty has no checkpoint in it: give a safetensors file, a folder"),
    "a cut save": (lambda at: PartialFolder(at / "empty" / step_name(1)).path.parent, "only a save that was cut off"),
    "a file missing": (lambda at: without_a_file(at / "two"), r"two lacks model-00002\S+ of the 2 files that model\.s"),
    "an index of others": (
        lambda at: index(at / "two", {"head": FIRST}),
        f"{FIRST} has no head, which its index tells of",
    ),
    "an index that leads away": (lambda at: index(at / "two", {"odd": "../file"}), "json is no index of safetensors"),
    "an index of nothing": (lambda at: index(at / "two", None), "json is no index of safetensors files, or damaged"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_one_sentence_on_every_rank(case: str, source: Path, tmp_path: Path) -> None:
    make, said = UNREADABLE[case]
    shutil.copy(source / "any name.st", tmp_path / "file")
    shutil.copytree(source / "two", tmp_path / "two")
    (tmp_path / "empty").mkdir()
    path = make(tmp_path)

    def on_a_rank(world: World) -> str:
        engine = build(world, HARD, 2, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=said) as error:
            engine.load_weights(path)
        assert engine.weights_sha256() == before
        return str(error.value)

    told = run_threads(on_a_rank, 2)[0]
    assert told == [told[0]] * 2
    assert "\n" not in told[0]


def test_a_flipped_byte_of_a_checkpoints_weights_is_refused_before_anything_has_changed(
    source: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(source / "run" / "checkpoints" / step_name(10), tmp_path / "step"))
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[pieces_of(read_manifest(path).parameters["embedding.weight"]["tensors"]["weight"])[0].byte] ^= 1
    file.write_bytes(content)

    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, 3, seed=1)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is not what was written"):
            engine.load_weights(path)
        assert engine.weights_sha256() == before

    run_threads(on_a_rank, 2)


def test_each_rank_reads_the_elements_that_it_holds(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for tensors whose elements lie in memory in another order, which every rank reads through."""
    num_read: dict[int, int] = {}
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        num_read[threading.get_ident()] = num_read.get(threading.get_ident(), 0) + count
        return count

    kind = KINDS["Muon and AdamW"]
    path = saved(tensors_of(plain(kind, 7)), source / "matrices.safetensors")
    with path.open("rb") as file:
        header_nbytes = 64 + int.from_bytes(file.read(8), "little")  # looked at, and then read

    def on_a_rank(world: World) -> int:
        engine = build(world, kind, 3, seed=1)
        num_read[threading.get_ident()] = 0
        engine.load_weights(path)
        return num_read[threading.get_ident()] - header_nbytes

    monkeypatch.setattr(os, "preadv", preadv)
    per_rank = run_threads(on_a_rank, 3)[0]
    data_nbytes = path.stat().st_size - header_nbytes + 64 - 8
    assert sum(per_rank) == data_nbytes
    assert max(per_rank) < data_nbytes / 2  # a third, but for the padding of tensors so small


def test_ranks_that_see_different_files_refuse_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(plain(HARD, 7))
    path = saved(tensors, tmp_path / "weights.safetensors")
    newer = saved(tensors | {"more": torch.ones(1)}, tmp_path / "newer.safetensors")
    real, here = start.find_weights, threading.local()
    here.rank = 0

    def find(source: Path) -> Any:
        return real(newer if here.rank == 1 else source)  # as where each machine has a disk of its own

    monkeypatch.setattr(start, "find_weights", find)

    def on_a_rank(world: World) -> None:
        here.rank = world.rank
        engine = build(world, HARD, 2)
        with pytest.raises(CheckpointError, match=r"is another on rank 1 than on rank 0"):
            engine.load_weights(path)

    run_threads(on_a_rank, 2)


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
            with pytest.raises(EngineStateError, match="failed in its midst, and the engine holds a part of it"):
                use()
        engine.load_weights(one, strict=False)
        with pytest.raises(EngineStateError, match=r"name\.st failed in its midst"):
            engine(torch.arange(9))
        engine.load_weights(path)
        assert_holds(engine, HARD, load_file(path))
        train(engine, 0)

    run_threads(on_a_rank, 2)


def test_ranks_that_are_given_different_paths_are_told(source: Path) -> None:
    def on_a_rank(world: World) -> None:
        engine = build(world, HARD, 2, seed=1)
        with pytest.raises(ConfigError, match="path is another on rank 1 than on rank 0; give all ranks the same"):
            engine.load_weights(source / ("two" if world.rank == 1 else "one"))
        train(engine, 0)

    run_threads(on_a_rank, 3)


def test_in_the_midst_of_a_step_nothing_is_loaded(source: Path) -> None:
    engine = build(alone(), HARD, 2)
    loss = engine(torch.arange(9))
    engine.load_weights(source / "one")
    with pytest.raises(EngineStateError, match="computed before"):
        engine.backward(loss)
    engine.backward(engine(torch.arange(9)))
    with pytest.raises(EngineStateError, match="weights cannot be loaded while a gradient waits"):
        engine.load_weights(source / "one")
    engine.step()
