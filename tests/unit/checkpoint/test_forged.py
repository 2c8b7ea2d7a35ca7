"""A manifest that was edited, its hash made to fit: what cannot be read by it is refused, and nothing is loaded."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, Kind, build, held, saved_by_two_ranks, train
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.manifest import DTYPES, hash_of
from zerotrain.commands import inspection as inspect
from zerotrain.commands.export import main as export
from zerotrain.errors import CheckpointError, ZeroTrainError

KIND = KINDS["hard parameters, AdamW"]
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_two_ranks(tmp_path_factory.mktemp("checkpoints") / "step", KIND)


@pytest.fixture
def edited(whole: Path, tmp_path: Path) -> Path:
    """A copy, whose manifest is to be edited."""
    return Path(shutil.copytree(whole, tmp_path / "step"))


def forge(path: Path, edit: Edit) -> None:
    """Edit a manifest, and make its hash fit."""
    content = json.loads((path / "manifest.json").read_text())
    del content["hash"]
    edit(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (path / "manifest.json").write_text(json.dumps({**content, "hash": hash_of(canonical)}))


def refused_everywhere(path: Path, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By inspect, export and the loading of an engine, each in one printable line."""
    with pytest.raises(CheckpointError, match=says) as caught:
        verify(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert inspect.main([str(path)]) == 2
    assert export([str(path), "--out", str(path.parent / "out")]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line == str(caught.value)
    assert not (path.parent / "out").exists()

    def load(world: zerotrain.World) -> None:
        engine = build(world, KIND, 1, seed=1)
        before = engine.weights_sha256(), len(held(engine))
        with pytest.raises(CheckpointError, match=says):
            engine.load(path)
        with pytest.raises(CheckpointError, match=says):
            engine.load_weights(path)
        assert (engine.weights_sha256(), len(held(engine))) == before
        train(engine, 0)

    run_threads(load, 1)


def parameter(content: dict[str, Any], name: str = "blocks.0.weight") -> Any:
    return content["parameters"][name]


def pieces(content: dict[str, Any], role: str = "weight", name: str = "embedding.weight") -> Any:
    return parameter(content, name)["tensors"][role]["pieces"]


def swapped(content: dict[str, Any]) -> None:
    one, other = (pieces(content, role)[0] for role in ("weight", "exp_avg"))
    one["byte"] = other["byte"]


FORGERIES: dict[str, tuple[Edit, str]] = {
    "a file outside of the folder": (
        lambda content: content["files"][0].update(name="../step/rank-00000.safetensors"),
        r"files\[0\]\.name: got ../step/rank-00000.safetensors; it must be the name of a file in this folder",
    ),
    "one file twice": (lambda content: content["files"][1].update(content["files"][0]), "another for each of 2 ranks"),
    "a dtype that is a function": (
        lambda content: parameter(content)["tensors"]["weight"].update(dtype="load"),
        r"parameters.*tensors.*dtype: it must be one of float64, ",
    ),
    "weights of whole numbers": (
        lambda content: parameter(content)["tensors"]["weight"].update(dtype="int32"),
        "parameters.blocks.0.weight has no weight of floating-point numbers",
    ),
    "an element in no file": (lambda content: pieces(content).pop(), "has 8.. elements|must have 888 elements"),
    "elements twice": (lambda content: pieces(content)[1].update(start=10), "embedding.weight has element"),
    "bytes of another tensor": (swapped, "lie in the same bytes of file 0"),
    "bytes behind the end": (
        lambda content: pieces(content)[0].update(byte=10**15), "at byte 1000000000000000 of file 0, where they cannot",
    ),
    "a file that is not there": (lambda content: pieces(content)[0].update(file=2), "of file 2, where they cannot lie"),
    "a number that is a text": (lambda content: pieces(content)[0].update(stop="7"), "stop: got a text; it must"),
    "no room for the shape": (
        lambda content: parameter(content).update(shape=[10**30, 0]), "shape: got .1000000000000000000000000000000, 0.",
    ),
    "strides that leave gaps": (
        lambda content: parameter(content).update(stride=[10**12, 1]), "strides .1000000000000, 1., which leave gaps",
    ),
    "fewer hashes than blocks": (lambda content: content["files"][0].update(hashes=[]), "the hashes of 0 blocks"),
    "a step below 0": (lambda content: content.update(step=-1), "step: got -1; it must be a whole number >= 0"),
    "no parameters": (lambda content: content.pop("parameters"), "parameters is missing"),
    "a rate that is a text": (
        lambda content: content["groups"][0]["hyperparameters"].update(lr="fast"), "lr: got .fast.",
    ),
    "the group behind the last": (lambda content: parameter(content).update(group=1), "is of group 1, and there are 1"),
    "a count of no dtype": (
        lambda content: parameter(content)["counts"].update(step={"dtype": "load"}), "step: got .*; it must be",
    ),
    "no momentum of a parameter": (
        lambda content: parameter(content)["tensors"].pop("exp_avg"), "which is updated with it",
    ),
    "a name that moves the cursor": (
        lambda content: content["buffers"].update({"\x1b[2Jx": content["buffers"].pop("num_calls")}),
        r"got \\x1b\[2Jx; it must be a printable name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused_in_one_line_and_nothing_is_loaded(
    forgery: str, edited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, says = FORGERIES[forgery]
    forge(edited, edit)
    refused_everywhere(edited, says, capsys)


def test_what_was_only_written_again_is_read(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(edited, lambda content: content["versions"].pop("python"))
    assert inspect.main([str(edited)]) == 0
    assert "Python None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda content: content["groups"][0]["hyperparameters"].update(betas=0.9),
            "betas of group 'parameters' is 0.9",
        ),
        (lambda content: content["groups"][0]["hyperparameters"].update(eps="x"), "eps of group 'parameters' is x"),
    ],
)
def test_state_of_another_kind_is_refused_before_a_number_has_changed(edit: Edit, says: str, edited: Path) -> None:
    forge(edited, edit)
    verify(edited)

    def load(world: zerotrain.World) -> None:
        engine = build(world, KIND, 2, seed=1)
        train(engine, 0)
        before = engine.weights_sha256()
        with pytest.raises(CheckpointError, match=says):
            engine.load(edited)
        assert engine.weights_sha256() == before
        train(engine, 1)

    run_threads(load, 2)


class Named(nn.Module):
    """Has a buffer of some name and values."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer(name, values)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * tokens.sum()


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"in": value}
    return value


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_can_be_saved_can_be_read(tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> None:
        for number, dtype in enumerate(DTYPES.values()):
            kind = Kind(functools.partial(Named, "größe", torch.ones(3).to(dtype)))
            engine = build(world, kind, 2)
            train(engine, 0)
            how: dict[str, Any] = {"extra": nested(50), "config": nested(50), "own": nested(50)}
            engine.save(tmp_path / str(number), **how)
            assert build(world, kind, 2).load(tmp_path / str(number)) == how["extra"]

    run_threads(save, 1)


@pytest.mark.parametrize(
    ("name", "values", "extra", "says"),
    [
        ("x\ny", torch.ones(3), None, r"'x\\ny' is the name of a tensor or group, and must be printable to be saved"),
        ("x", torch.ones(3), nested(51), r"lies in more than 50 dicts and lists; save it flatter"),
        ("x", torch.ones(3), nested(3000), r"lies in more than 50 dicts and lists; save it flatter"),
        ("x", torch.empty(3, dtype=torch.bits8), None, "x is of torch.bits8, and what is saved may be of float64, "),
    ],
)
def test_what_could_not_be_read_again_is_not_saved(
    name: str, values: torch.Tensor, extra: Any, says: str, tmp_path: Path
) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, Kind(functools.partial(Named, name, values)), 2)
        train(engine, 0)
        with pytest.raises(ZeroTrainError, match=says):
            engine.save(tmp_path / "step", extra=extra)
        train(engine, 1)

    run_threads(save, 2)
    assert list(tmp_path.iterdir()) == []
