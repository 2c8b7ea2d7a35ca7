"""Weights to start from: out of files of anybody's and checkpoints of ours, into the shards of any stage."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, Kind, Matrices, build, counted, held, train
from tests.unit.engine.parts import Linears, alone, assert_same, engine_on, seeded, train as train_engine
from tests.unit.engine.state.weight_files import (
    HARD,
    MODELS,
    Tensors,
    assert_holds,
    load_at_some_places,
    plain,
    saved,
    some_places,
    tensors_of,
    trained_run,
)
from zerotrain.checkpoint.folder import step_name
from zerotrain.comm.world import World
from zerotrain.engine.state.from_weights import match_weights
from zerotrain.errors import CheckpointError
from zerotrain.files.match import ModelTensor, StoredTensor


@pytest.mark.case(
    "checkpoints",
    "weights out of a safetensors file",
    "in fp32, bf16 or fp64, at any stage on 1, 2, 3 ranks; tied, frozen, transposed, adapters, Muon, fp16, bf16: equal "
    "to plain PyTorch's `load_state_dict` of them, bit for bit",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(2)
def test_a_file_is_loaded_at_any_placement_as_plain_pytorch_loads_it(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = saved(tensors_of(plain(MODELS[name], 7), dtype), tmp_path / "weights.safetensors")
    state, number = load_file(path), list(MODELS).index(name) + (dtype is torch.bfloat16)
    said = load_at_some_places(path, MODELS[name], state, number)
    assert said == [f"{len(state)} tensors loaded from {path}"]


@pytest.mark.case(
    "checkpoints", "after training", "the optimizer keeps its state", under="weights out of a safetensors file"
)
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


@pytest.mark.case(
    "checkpoints",
    "a folder of Hugging Face in one file or several, a checkpoint, a run",
    under="weights out of a safetensors file",
)
@pytest.mark.parametrize(("name", "number"), [("tied, frozen, odd, turned", 0), ("the same in bf16", 1), ("Muon", 2)])
def test_weights_alone_are_taken_from_a_checkpoint_of_any_placement(name: str, number: int, tmp_path: Path) -> None:
    kind = MODELS[name]
    state = trained_run(tmp_path, kind)

    def on_a_rank(world: World, stage: int) -> None:
        engine = build(world, kind, stage, seed=1)
        loaded = engine.load_weights(tmp_path)
        assert loaded.path == tmp_path / "checkpoints" / step_name(2)
        assert engine.stamps.num_steps == 0
        assert all(role == "weight" for _, role, _, _ in held(engine))
        assert_holds(engine, kind, state)

    for stage, size in some_places(number):
        run_threads(lambda world, stage=stage: on_a_rank(world, stage), size)


def test_a_large_tensor_in_another_order_than_in_the_file_is_read_to_its_places(tmp_path: Path) -> None:
    """In more than one piece, by two ranks of which each holds a part."""

    class Turned(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.arange(400.0 * 401.0).view(401, 400).t())

    kind = Kind(Turned)
    path = saved(tensors_of(plain(kind, 7)), tmp_path / "weights.safetensors")

    def on_a_rank(world: World) -> None:
        engine = build(world, kind, 2, seed=1)
        with torch.no_grad():
            engine.module.turned.zero_()
        engine.load_weights(path)
        assert_holds(engine, kind, load_file(path))

    run_threads(on_a_rank, 2)


FORMS = ["any name.st", "one", "one/model.safetensors", "two", "two/model.safetensors.index.json", "run"]
FORMS += ["run/checkpoints", f"run/checkpoints/{step_name(10)}"]


@pytest.mark.case(
    "checkpoints",
    "a folder of Hugging Face in one file or several, a checkpoint, a run",
    "the same weights",
    under="weights out of a safetensors file",
)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_weights_lie_in_many_forms(form: str, source: Path) -> None:
    engine = build(alone(), HARD, 2, seed=1)
    engine.load_weights(str(source / form))
    assert_holds(engine, HARD, load_file(source / "any name.st"))


class Around(nn.Module):
    """As a class of one's own around a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"inner": Matrices()})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model["inner"](tokens)


@pytest.mark.case(
    "checkpoints",
    "of a wrapped model (`module.`, `_orig_mod.`), or for a class around it",
    "loaded, with a line that says so",
    under="weights out of a safetensors file",
)
@pytest.mark.parametrize(
    ("before", "made", "said"),
    [
        ("module.", Matrices, "'module.', with which all names in it begin, was left out"),
        ("_orig_mod.", Matrices, "'_orig_mod.', with which all names in it begin, was left out"),
        ("_orig_mod.module.", Matrices, "'_orig_mod.module.', with which all names in it begin, was left out"),
        ("", Around, "'model.inner.', with which all names of the model begin, was put before those in it"),
    ],
    ids=["DDP", "compiled", "both", "a class around the model"],
)
def test_a_word_before_all_names_is_no_hindrance_and_is_told(
    before: str, made: type[nn.Module], said: str, tmp_path: Path
) -> None:
    tensors = tensors_of(plain(Kind(Matrices), 7))
    path = saved({before + name: value for name, value in tensors.items()}, tmp_path / "weights.safetensors")
    engine = build(alone(), Kind(made), 2, seed=1)
    saved({before + "more": torch.ones(1), before + "blocks.0.weight": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"two.safetensors: {said}")):
        engine.load_weights(tmp_path / "two.safetensors")
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
            self.blocks[0], self.blocks[1] = Renamed(), Renamed()

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


def test_where_two_words_would_make_names_fit_none_is_taken() -> None:
    wanted = [ModelTensor([name], torch.zeros(2)) for name in ("model.inner.weight", "model.inner.inner.weight")]
    stored = StoredTensor(["inner.weight"], "F32", torch.float32, (2,))
    loaded = match_weights(Path("file"), [stored], wanted)
    assert loaded.surplus == ("inner.weight",)
    assert loaded.missing == ("model.inner.weight", "model.inner.inner.weight")
    assert loaded.renamed == ""
    assert not any(each.stored for each in wanted)


# Full weights into the shards of any stage.


class Kept(Linears):
    """With a tied and a frozen layer, a buffer, an integer, and a number beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("number", torch.tensor(0))
        self.extra = "old"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset.to(x.dtype))


EVERYWHERE = pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, precision) for stage in range(4) for size in (1, 2, 3) for precision in ("fp32", "bf16")],
)


@pytest.mark.case(
    "around_a_step",
    "`engine.load_state_dict(full)`",
    "loads rank 0's dict at every stage; names and shapes are checked before anything changes",
)
@EVERYWHERE
@pytest.mark.thinned(5)
def test_what_was_taken_out_trains_on_to_the_same_bits_in_another_engine(stage: int, size: int, precision: str) -> None:
    def on_a_rank(world: World) -> list[str]:
        one = engine_on(world, Kept, zero={"stage": stage}, precision=precision)
        one.module.offset.fill_(0.5)
        one.module.number.fill_(9)
        one.module.extra = "new"
        train_engine(one, 0, 1)
        taken = one.full_state_dict() | ({"_extra_state": "new"} if world.rank == 0 else {})
        other = engine_on(world, Kept, zero={"stage": (stage + 2) % 4}, precision=precision)
        train_engine(other, 5)
        other.load_state_dict(taken)
        assert other.module.extra == "new"
        assert (other.module.offset.tolist(), other.module.number.item()) == ([0.5] * 3, 9)
        hashes = [one.weights_sha256(), other.weights_sha256()]
        for engine in (one, other):
            train_engine(engine, 2)
        return [*hashes, one.weights_sha256(), other.weights_sha256()]

    for before, loaded, after, trained in run_threads(on_a_rank, size, late_rank=size - 1)[0]:
        assert (before, after) == (loaded, trained)
        assert before != after


@pytest.mark.parametrize("stage", range(4))
def test_what_is_not_given_stays(stage: int) -> None:
    def on_a_rank(world: World) -> dict[str, Any]:
        engine = engine_on(world, Kept, zero={"stage": stage})
        given = {"blocks.3.weight": torch.ones(8, 8), "output.bias": torch.full((5,), 2.0), "unknown": torch.ones(1)}
        engine.load_state_dict(given if world.rank == 0 else {}, strict=False)
        return engine.full_state_dict()

    got = run_threads(on_a_rank, 2)[0][0]
    expected = dict(seeded(Kept).named_parameters())
    changed = {"blocks.0.weight": torch.ones(8, 8), "output.bias": torch.full((5,), 2.0)}
    assert_same({name: got[name] for name in expected}, {n: p.detach() for n, p in expected.items()} | changed)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


REFUSED: dict[str, tuple[Callable[[dict[Any, Any]], dict[Any, Any]], str]] = {
    "missing": (
        without("input.bias"),
        r"load_state_dict: the dict does not fit the engine: it lacks input\.bias; or give strict",
    ),
    "unknown": (lambda state: state | {"head.weight": torch.ones(1)}, r"the model has no head\.weight"),
    "a number for a name": (lambda state: state | {3: torch.ones(1)}, "the model has no 3; or"),
    "shape": (lambda state: state | {"input.bias": torch.ones(3)}, r"input\.bias is of shape \(3,\) in it, and of"),
}


@pytest.mark.case("around_a_step", "`engine.load_state_dict(full)`")
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_has_changed(case: str) -> None:
    change, answer = REFUSED[case]

    def on_a_rank(world: World) -> None:
        engine = engine_on(world, zero={"stage": 2})
        before = engine.weights_sha256()
        state = {name: value + 1 for name, value in seeded(Linears).state_dict().items()}
        with pytest.raises(zerotrain.ConfigError, match=answer):
            engine.load_state_dict(change(state) if world.rank == 0 else {})
        assert engine.weights_sha256() == before
        train_engine(engine, 0)

    run_threads(on_a_rank, 2)


@pytest.mark.parametrize("takes", ["load_state_dict", "load_weights"])
def test_while_a_gradient_waits_nothing_is_loaded_and_a_loss_from_before_is_refused(takes: str, source: Path) -> None:
    engine = build(alone(), HARD, 2)
    given = source / "one" if takes == "load_weights" else engine.full_state_dict()
    load = partial(getattr(engine, takes), given)
    loss = engine(torch.arange(9))
    load()
    with pytest.raises(zerotrain.EngineStateError, match="computed before"):
        engine.backward(loss)
    engine.backward(engine(torch.arange(9)))
    with pytest.raises(zerotrain.EngineStateError, match="weights cannot be loaded while a gradient waits"):
        load()
    engine.step()
