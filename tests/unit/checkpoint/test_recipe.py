"""The recipe of docs/reference/checkpoint_format.md, as it stands there, and the files by safetensors alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zerotrain
from tests.unit.checkpoint.runs import KINDS, Matrices, build, held, joined, train
from zerotrain.testing.fake_wire import run_threads

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "checkpoint_format.md"
RECIPE = re.search(r"```python\n# read_checkpoint\.py\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.case("checkpoints", "reading without zerotrain", "ten lines of safetensors and JSON")
def test_a_few_lines_of_safetensors_and_json_read_weights_and_optimizer_state(tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> tuple[object, dict[str, torch.Tensor]]:
        engine = build(world, KINDS["hard parameters, bf16, momentum"], 3)
        train(engine, 0, 1)
        engine.save(tmp_path / "step")
        return held(engine), engine.full_state_dict()

    results, _ = run_threads(save, 3)
    assert RECIPE is not None
    (tmp_path / "read_checkpoint.py").write_text(RECIPE[1])
    command = [sys.executable, "-I", "read_checkpoint.py", str(tmp_path / "step"), str(tmp_path / "weights.pt")]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    read = torch.load(tmp_path / "weights.pt")
    assert "zerotrain" not in RECIPE[1].replace("zerotrain checkpoint", "")
    whole = results[0][1]
    names = {name for name in whole if name in read["weight"]}
    assert len(names) >= 10
    assert all(torch.equal(read["weight"][name].float(), whole[name]) for name in names)
    assert read["weight"]["turned"].stride() == (1, 24)
    state = joined([each[0] for each in results])
    assert state.keys() == {(name, role) for role, tensors in read.items() for name in tensors}
    momentum = read["momentum_buffer"]["odd"]
    assert torch.equal(momentum.flatten(), state["odd", "momentum_buffer"])


def test_the_files_of_all_stages_hold_the_same_and_each_element_lies_in_one(tmp_path: Path) -> None:
    for stage in range(4):

        def save(world: zerotrain.World, stage: int = stage) -> None:
            engine = build(world, KINDS["Muon and AdamW"], stage)
            train(engine, 0, 1)
            engine.save(tmp_path / str(stage))

        run_threads(save, 2)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        files = [load_file(tmp_path / str(stage) / name) for stage in range(4)]
        assert files[0]
        for other in files[1:]:
            assert other.keys() == files[0].keys()
            assert all(torch.equal(other[key], files[0][key]) for key in other)


def test_the_library_finds_each_tensor_where_the_manifest_says(tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, KINDS["a frozen base in bf16 with adapters"], 3)
        engine.module.register_buffer("odd_kind", torch.tensor([1 + 2j, 3j]))
        train(engine, 0)
        engine.save(tmp_path / "step")

    run_threads(save, 2)
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    num_read = 0
    for name, parameter in manifest["parameters"].items():
        for role, tensor in parameter["tensors"].items():
            for piece in tensor["pieces"]:
                path = tmp_path / "step" / manifest["files"][piece["file"]]["name"]
                with safe_open(path, "pt") as file:
                    values = file.get_tensor(f"{role}/{name}")
                assert str(values.dtype) == f"torch.{tensor['dtype']}"
                raw = path.read_bytes()[piece["byte"] : piece["byte"] + values.nbytes]
                assert values.view(torch.uint8).numpy().tobytes() == raw
                assert values.numel() == piece["stop"] - piece["start"]
                num_read += 1
    assert num_read > len(manifest["parameters"])
    with safe_open(tmp_path / "step" / "rank-00000.safetensors", "pt") as file:
        # A dtype that the format does not have: its bytes.
        assert file.get_tensor("buffer/odd_kind").view(torch.complex64).tolist() == [1 + 2j, 3j]
        assert file.metadata()["rank"] == "0"

    def load(world: zerotrain.World) -> list[complex]:
        engine = build(world, KINDS["a frozen base in bf16 with adapters"], 1, seed=1)
        engine.module.register_buffer("odd_kind", torch.zeros(2, dtype=torch.complex64))
        engine.load(tmp_path / "step")
        return engine.module.odd_kind.tolist()

    assert run_threads(load, 1)[0] == [[1 + 2j, 3j]]


def test_what_a_manifest_tells_of_a_run(tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, KINDS["Muon and AdamW"], 2)
        train(engine, 0)
        engine.save(tmp_path / "step", extra=[1], config={"train": {"lr": 0.5}})

    run_threads(save, 2)
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert [manifest[name] for name in ("step", "stage", "ranks", "virtual_ranks")] == [1, 2, 2, 2]
    assert manifest["config"] == {"train": {"lr": 0.5}}
    assert len(manifest["config_sha256"]) == 64
    assert [group["optimizer"] for group in manifest["groups"]] == ["AdamW", "Muon"]
    assert manifest["versions"]["torch"] == torch.__version__
    names = [name for name, _ in Matrices().named_parameters()]
    assert sorted(manifest["parameters"]) == sorted(names)
    assert manifest["parameters"]["blocks.0.weight"]["tensors"]["momentum_buffer"]["shape"] == [24, 24]
