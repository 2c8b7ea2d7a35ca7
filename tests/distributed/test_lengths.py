"""Runs whose length is given in epochs, from the command line: their steps, and what the same command does again."""

import json
from pathlib import Path

from commands import TINY, result_of

from tests.zygote.client import Ending, Zygote

SETTINGS = [each for each in TINY if not each.startswith("train.max_steps")]
"""64 sequences to train on, in batches of two for each rank."""


def test_a_run_of_epochs_ends_goes_on_and_is_left_alone_as_one_of_steps(zygote: Zygote, tmp_path: Path) -> None:
    def run(*settings: str) -> Ending:
        common = ("hydra.run.dir=run", "launch.nproc_per_node=2", "checkpoint.resume=auto", "train.eval_every=0")
        return zygote.run([*SETTINGS, *common, *settings], tmp_path)

    first = run("train.num_epochs=0.2")
    assert first.code == 0, first.err
    assert "train.max_steps=4, from train.num_epochs=0.2" in first.out  # 12.8 sequences in batches of 4
    result = result_of(tmp_path / "run")
    assert (result["status"], result["steps"]) == ("completed", 4)
    assert "train.num_epochs=0.4 checkpoint.resume=auto" in first.out
    assert "train.num_epochs=0.2" not in first.out.split("to go on: ")[1]
    again = run("train.num_epochs=0.2")
    assert (again.code, result_of(tmp_path / "run")) == (0, result)
    assert "holds this run already, and it is completed; nothing is changed" in again.out
    other = run("train.num_epochs=0.2", "optimizer.lr=1e-4")
    assert other.code == 2
    assert "holds a completed run with other settings (optimizer.lr: 0.003 there, 0.0001 here)" in other.err
    shorter = run("train.num_epochs=0.1")
    assert shorter.code == 2
    assert "train.num_epochs=0.1: is 7 rows, and the checkpoint to go on from has been trained on 16" in shorter.err
    longer = run("train.max_tokens=384")  # 24 sequences of 16 tokens
    assert longer.code == 0, longer.err
    result = result_of(tmp_path / "run")
    assert (result["status"], result["steps"]) == ("completed", 6)
    [manifest] = (tmp_path / "run/checkpoints/step-00000006").glob("manifest.json")
    noted = json.loads(manifest.read_text())["config"]["train"]
    assert (noted["max_steps"], noted["max_tokens"], noted["num_epochs"]) == (6, 384.0, None)
