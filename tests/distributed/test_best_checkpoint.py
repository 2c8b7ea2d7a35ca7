"""The best checkpoint of a run of several ranks, by its link, in each command that takes a checkpoint."""

import json
import os
from pathlib import Path

import pytest
from commands import TINY, result_of

from tests.zygote.client import Ending, Zygote

RATES = {4: 0.01, 12: 100.0}
"""The learning rate until so many steps are done: the loss falls, and rises."""
SETTINGS = [each for each in TINY if not each.startswith(("train.max_steps", "train.micro_batch_size"))]
SETTINGS += ["train.micro_batch_size=8", "data.vocab_size=16", "scheduler=constant"]


@pytest.mark.case(
    "checkpoints", "`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not"
)
def test_the_best_checkpoint_is_that_of_the_lowest_loss_and_every_command_takes_it(
    zygote: Zygote, tmp_path: Path
) -> None:
    def run(*settings: str) -> Ending:
        common = ("hydra.run.dir=run", "launch.nproc_per_node=2", "train.eval_every=1", "checkpoint.resume=auto")
        saving = ("checkpoint.best=val_loss", "checkpoint.keep=1", "checkpoint.every=2")
        done = zygote.run([*SETTINGS, *common, *saving, *settings], tmp_path)
        assert done.code == 0, done.err
        return done

    def command(verb: str, *arguments: str) -> str:
        done = zygote.run([verb, "run/checkpoints/best", *arguments], tmp_path, module="zerotrain")
        assert done.code == 0, done.err
        return done.out

    def losses() -> dict[int, float]:
        lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None and line["step"]}

    folder = tmp_path / "run/checkpoints"
    for max_steps, rate in RATES.items():
        run(f"train.max_steps={max_steps}", f"optimizer.lr={rate}")
        best = min(losses(), key=losses().__getitem__)
        names = {"best", f"step-{best:08d}", f"step-{max_steps:08d}"}
        assert os.readlink(folder / "best") == f"step-{best:08d}"
        assert {path.name for path in folder.iterdir()} == names
    assert 1 < best < 12
    assert result_of(tmp_path / "run")["checkpoint"] == str(folder / "step-00000012")
    assert command("evaluate", "launch.nproc_per_node=2").startswith(f"step {best}: validation loss {losses()[best]!r}")
    command("export", "--out", "exported")
    assert json.loads((tmp_path / "exported/zerotrain_export.json").read_text())["step"] == best
    assert f"step {best}, saved by 2 ranks" in command("inspect")
