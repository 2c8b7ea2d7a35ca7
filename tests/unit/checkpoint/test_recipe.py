"""The recipe of docs/reference/checkpoint_format.md, as it stands there, and the files by safetensors alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, build, held, joined, train

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
