"""Runs whose stage changes, from the command line: their bits, what they go on at, and the memory that takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, result_of

from tests.zygote.client import Zygote

MIB = 2**20
ROUND = "zero.schedule={0:0,5:1,10:2,15:3,20:1,25:0}"
TRAININGS = {
    "bf16, Muon, tied": (3, ("model=gpt_tiny", "model.hidden_size=32", "precision=bf16", "optimizer=muon")),
    "fp16, accumulation": (2, ("precision=fp16", "train.gradient_accumulation_steps=2", "precision.growth_interval=4")),
}


def run(zygote: Zygote, folder: Path, name: str, *settings: str) -> dict[str, Any]:
    given = {each.partition("=")[0] for each in settings}
    tiny = [each for each in TINY if each.partition("=")[0] not in given]
    ending = zygote.run([*tiny, f"hydra.run.dir={name}", *settings], folder, {})
    assert ending.code == 0, ending.out + ending.err
    return result_of(folder / name)


@pytest.mark.case(
    "checkpoints",
    "every five steps through 0-1-2-3-1-0, on 2 and 3 ranks: fp32, bf16, fp16, tied, adapters on "
    "a frozen base, Muon, clipping, accumulation, `zero.accumulate=reduced`, virtual ranks; saves "
    "and evaluations between and at the changes",
    under="`zero.schedule` changes the stage in mid-run",
)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_that_changes_its_stage_every_five_steps_has_the_weights_of_one_that_does_not(
    name: str, zygote: Zygote, tmp_path: Path
) -> None:
    num_ranks, settings = TRAININGS[name]
    settings = (*settings, "zero.bucket_mb=0.02", "train.max_steps=30", f"launch.nproc_per_node={num_ranks}")
    fixed = run(zygote, tmp_path, "fixed", "zero.stage=2", *settings)
    changing = run(zygote, tmp_path, "changing", ROUND, "checkpoint.every=7", *settings)
    assert changing["weights_sha256"] == fixed["weights_sha256"]
    assert [each["stage"] for each in changing["stages"]] == [0, 1, 2, 3, 1, 0]


@pytest.mark.case(
    "checkpoints",
    "and it goes on at step 600 of `{0: 0, 500: 3}`",
    "the engine is built at stage 3: peak memory is that of a run at stage 3",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_a_run_that_goes_on_needs_the_memory_of_the_stage_it_goes_on_at(zygote: Zygote, tmp_path: Path) -> None:
    """P is 102 MB of parameters; at stage 0 a rank holds 3P before its first step, at stage 3 half of that. It built
    stage 0 first, to go on at stage 3 (2026-11-22): 153 MB more by the formulas; two runs of the same have
    differed by 71."""
    schedule = "zero.schedule={0:0,2:3}"
    wide = ("model.hidden_size=1408", "model.num_layers=12", "model.context=1", "launch.nproc_per_node=2")
    common = (*wide, "zero.bucket_mb=4", "train.micro_batch_size=1", "train.eval_every=0")
    run(zygote, tmp_path, "first", schedule, *common, "train.max_steps=3", "checkpoint.every=1", "checkpoint.keep=null")
    go_on = (*common, "train.max_steps=4", "checkpoint.resume=first", "checkpoint.save_at_end=false")
    peaks = {}
    for name, setting in (("at once", "zero.stage=3"), ("again", schedule)):
        result = run(zygote, tmp_path, name, setting, *go_on)
        peaks[setting] = max(each["peak_nbytes"] for each in result["stages"][-1]["ranks"])
    log = (tmp_path / "again/ranks/0.log").read_text()
    assert "stage 3, MB of a rank" in log
    assert "-> 3 after step 3" not in log
    assert peaks[schedule] - peaks["zero.stage=3"] < 100 * MIB, peaks


@pytest.mark.case(
    "checkpoints",
    "where the newest checkpoint is damaged otherwise, and an older one is taken",
    "built at the stage of the newest, then changed, with a line that says so",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_where_the_newest_checkpoint_is_damaged_the_stage_of_an_older_one_is_changed_to(
    zygote: Zygote, tmp_path: Path
) -> None:
    settings = ("zero.schedule={0:1,2:3,3:0}", "launch.nproc_per_node=2", "train.max_steps=4", "checkpoint.resume=auto")
    kept = ("checkpoint.every=1", "checkpoint.keep=null", "checkpoint.save_at_end=false")
    whole = run(zygote, tmp_path, "run", *settings, *kept)
    for step in (4, 3):
        [*_, last] = sorted((tmp_path / f"run/checkpoints/step-{step:08d}").glob("*.safetensors"))
        last.write_bytes(last.read_bytes()[:-1] + b"\0")
    (tmp_path / "run/result.json").unlink()  # a completed run would be left as it is
    again = run(zygote, tmp_path, "run", *settings, *kept)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["resumed_from"].endswith("step-00000002")
    assert "stage 0 -> 3 after step 2: sent" in (tmp_path / "run/ranks/0.log").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines if "stage" in line] == [(2, 3), (3, 0)]
