"""An average of the weights in runs as processes: resumed elsewhere, evaluated and exported."""

import json
from pathlib import Path

import pytest
from commands import TINY
from safetensors.torch import load_file

from tests.zygote.client import Zygote
from zerotrain.checkpoint.verification import open_checkpoint
from zerotrain.commands import evaluate, generate
from zerotrain.commands.export import main as export

SETTINGS = [each for each in TINY if not each.startswith("train.max_steps")]
SETTINGS += [
    "train.virtual_ranks=2",
    "train.eval_every=2",
    "callbacks=ema",
    "callbacks.ema.decay=0.9",
    "scheduler=constant",
]


@pytest.mark.case(
    "checkpoints",
    "`callbacks=ema`: resumed on one rank at another stage, evaluated, exported with `--weights ema`",
    "the average and the losses of a run that never stopped; the exported file is the average",
)
@pytest.mark.usefixtures("evaluates_here")
def test_a_resumed_run_has_the_average_of_one_that_never_stopped_and_it_is_what_is_exported(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: str, *settings: str) -> None:
        done = zygote.run([*SETTINGS, f"hydra.run.dir={folder}", *settings], tmp_path)
        assert done.code == 0, done.err

    def losses(folder: str) -> dict[int, float]:
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}

    run("whole", "train.max_steps=6", "launch.nproc_per_node=2", "zero.stage=2", "precision=bf16")
    run("parts", "train.max_steps=4", "launch.nproc_per_node=2", "zero.stage=3", "precision=bf16")
    run("parts", "train.max_steps=6", "zero.stage=1", "precision=bf16", "checkpoint.resume=auto")
    assert losses("parts") == losses("whole")
    for name in ("whole", "parts"):
        assert export([str(tmp_path / name), "--weights", "ema", "--out", str(tmp_path / f"{name}-out")]) == 0
    found, other = (load_file(tmp_path / f"{name}-out/model.safetensors") for name in ("whole", "parts"))
    with open_checkpoint(tmp_path / "whole", averaged=True) as average, open_checkpoint(tmp_path / "whole") as trained:
        assert found.keys() == other.keys() == average.names.keys()
        for name, values in found.items():
            assert values.equal(other[name])
            assert values.equal(average.of_role(name, "weight_average"))
            assert not values.equal(trained.read(name))
    capsys.readouterr()
    for path, options in (("whole", ["--weights", "ema", "zero.stage=3"]), ("parts-out", [])):
        assert evaluate.main([str(tmp_path / path), *options]) == 0
        assert capsys.readouterr().out == f"step 6: validation loss {losses('whole')[6]!r}\n"
    assert evaluate.main([str(tmp_path / "whole")]) == 0
    shown = capsys.readouterr()
    assert shown.out != f"step 6: validation loss {losses('whole')[6]!r}\n"
    assert "the run evaluates its average of weights" in shown.err


def test_weights_that_are_not_there_are_refused_in_a_line(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = zygote.run([*TINY, "hydra.run.dir=bare"], tmp_path)
    assert done.code == 0, done.err
    bare, out = str(tmp_path / "bare"), str(tmp_path / "out")
    lacks = f"{bare}/checkpoints/step-00000003 holds no average of weights, which a run keeps with callbacks=ema; "
    lacks += "take its trained weights"
    assert export([bare, "--out", out]) == 0
    one_set = f"--weights: got ema, but {out} holds one set of weights; leave it out"
    for command, given, said in (
        (export, [bare, "--out", f"{out}2"], lacks),
        (evaluate.main, [bare], lacks),
        (generate.main, [bare, "--prompt", "a"], lacks),
        (evaluate.main, [out], one_set),
        (generate.main, [out, "--prompt", "a"], one_set),
        (export, [bare, "--out", f"{out}2", "--dcp"], "--dcp: the optimizer's state is that of the trained weights; "),
        (export, [bare, "--out", f"{out}2", "--optimizer"], "--optimizer: the optimizer's state is that of the"),
    ):
        capsys.readouterr()
        assert command([*given, "--weights", "ema"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(said)
    assert evaluate.main([bare, "--weights", "EMA"]) == 2
    assert capsys.readouterr().err == "--weights: got EMA; it must be trained or ema\n"
    assert not Path(f"{out}2").exists()
