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


@pytest.mark.slow
def test_by_a_metric_the_best_and_the_stop_are_the_same_after_a_resume(zygote: Zygote, tmp_path: Path) -> None:
    """Accuracy of a further set, of which higher is better, on 4, 2 and 1 ranks at other stages; killed in the middle,
    and resumed. `evaluate` tells its numbers, on 3 ranks."""
    following = ["data.validation_sets={other: {num_sequences: 90}}", "metrics=[accuracy,perplexity]"]
    following += ["checkpoint.best=val_accuracy/other", "callbacks=early_stopping"]
    following += ["callbacks.early_stopping.metric=val_accuracy/other", "callbacks.early_stopping.patience=3"]
    following += ["callbacks.accuracy.of=[validation,training]", "train.log_every=3"]
    common = ["train.virtual_ranks=4", "train.micro_batch_size=1", "train.eval_every=1", "checkpoint.every=2"]
    common += ["checkpoint.resume=auto", "optimizer.lr=0.01", "train.max_steps=40", *following]

    def run(folder: str, ranks: int, stage: int, *settings: str) -> Ending:
        placement = [f"hydra.run.dir={folder}", f"launch.nproc_per_node={ranks}", f"zero.stage={stage}"]
        return zygote.run([*SETTINGS, *common, *placement, *settings], tmp_path)

    def told(folder: str) -> list[dict[str, float]]:
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        # A run that is stopped logs no further line; of training it logs every third.
        named = ("step", "val_loss", "val_accuracy/other", "val_perplexity/other", "train_accuracy")
        return [{name: line[name] for name in named if name in line} for line in lines]

    once = run("once", 4, 3)
    assert once.code == 0, once.err
    stopped_at = result_of(tmp_path / "once")["steps"]
    assert (result_of(tmp_path / "once")["stopped_by"], stopped_at < 40) == ("callbacks.early_stopping", True)
    killing = "+callbacks.killing={_target_: killing.Killing, steps: [3]}"
    assert run("twice", 2, 1, killing).code == 1
    again = run("twice", 1, 0)
    assert again.code == 0, again.err
    assert told("twice") == told("once")
    assert result_of(tmp_path / "twice")["steps"] == stopped_at
    assert os.readlink(tmp_path / "twice/checkpoints/best") == os.readlink(tmp_path / "once/checkpoints/best")
    evaluating = ["evaluate", "twice/checkpoints/best", "launch.nproc_per_node=3", "zero.stage=3"]
    evaluated = zygote.run(evaluating, tmp_path, module="zerotrain")
    assert evaluated.code == 0, evaluated.err
    lines = list(map(json.loads, (tmp_path / "twice/metrics.jsonl").read_text().splitlines()))
    best = int(os.readlink(tmp_path / "twice/checkpoints/best").removeprefix("step-"))
    [last] = [line for line in lines if "val_loss" in line and line["step"] == best]
    assert evaluated.out.splitlines() == [
        f"step {last.pop('step')}: validation loss {last.pop('val_loss')!r}",
        *(f"  {name.removeprefix('val_').removeprefix('loss/')}: {value!r}" for name, value in last.items()),
    ]
    assert len(last) == 5  # without step and val_loss
