"""Twenty causes of bad steps, planted in runs of 4 ranks that go on with 2 and with 1 at other stages, are found by a
replay on one rank, which has the bits of the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zygote.client import Zygote

ROWS_OF_A_STEP = 16
"""4 virtual ranks x 2 micro-batches x 2."""
PLACES = (0, 3, 6, 9)
"""Of bad rows within their steps, each in another micro-batch."""
SETTINGS = (
    "launch.device=cpu",
    "launch.threads_per_rank=1",
    "model=mlp",
    "model.vocab_size=16",
    "data=own",
    "model._target_=planted.Net",
    "data._target_=planted.Data",
    "scheduler=constant",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.virtual_ranks=4",
    "train.eval_batches=1",
    "train.sample_tokens=0",
    "checkpoint.every=1",
    "checkpoint.keep=null",
    "precision.initial_scale=16",
    "hydra.run.dir=run",
)
LEGS = ((4, 3), (2, 4), (1, 6))
"""Ranks, and the step until which they train."""
RUNS = {
    "fp32": ((0, 2, 3), {2: "no_number", 3: "exponent", 4: "zero", 5: "label"}),
    "bf16": ((3, 1, 0), {2: "flat", 3: "infinite", 4: "exponent", 5: "label"}),
    "fp16": ((2, 3, 1), {2: "huge", 3: "exponent", 4: "flat", 5: "label"}),
    "fp32, in parts": ((3, 0, 2), {2: "label", 3: "flat", 4: "infinite", 5: "zero"}),
    "bf16, in parts": ((1, 3, 2), {2: "exponent", 3: "zero", 4: "label", 5: "no_number"}),
}
"""By precision: the stage of each leg, and what is wrong in which step."""
FOUND = {
    "no_number": "the input of first (Linear)",
    "infinite": "the input of first (Linear)",
    "huge": "first (Linear) in the forward",
    "exponent": "exponent (Exponent) in the forward",
    "flat": "normal (Normal) in the forward",
    "zero": "what comes behind gain (Linear) in the backward",  # Root
}


def bad_row(step: int) -> int:
    return ROWS_OF_A_STEP * (step - 1) + PLACES[step % len(PLACES)]


def train(zygote: Zygote, folder: Path, name: str) -> None:
    stages, causes = RUNS[name]
    planted = ",".join(f"{bad_row(step)}:{cause}" for step, cause in causes.items())
    in_parts = ("zero.bucket_mb=0.0001",) if name.endswith("in parts") else ()
    given = (f"precision={name[:4]}", f"+data.causes={{{planted}}}", *in_parts)
    for (num_ranks, until), stage in zip(LEGS, stages, strict=True):
        leg = (
            f"launch.nproc_per_node={num_ranks}",
            f"zero.stage={stage}",
            f"train.max_steps={until}",
            "checkpoint.resume=auto",
        )
        ending = zygote.run([*SETTINGS, *given, *leg], folder)
        assert ending.code == 0, ending.err


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.thinned(2)
def test_a_replay_on_one_rank_names_the_step_the_row_and_the_module(name: str, zygote: Zygote, tmp_path: Path) -> None:
    train(zygote, tmp_path, name)
    for step, cause in RUNS[name][1].items():
        arguments = ["replay", "run", "--step", str(step), "--rows", "--trust-code"]
        ending = zygote.run(arguments, tmp_path, module="zerotrain")
        assert ending.code == 0, ending.out + ending.err
        body: dict[str, Any] = json.loads((tmp_path / "replay.json").read_text())
        assert (body["step"], body["from_step"], body["differs"]) == (step, step - 1, None)
        assert bad_row(step) in body["worst"]["rows"], cause
        norms = {each["row"]: each["alone"]["grad_norm"] for each in body["rows"]}
        worst = norms.pop(bad_row(step))
        assert None not in norms.values()
        assert body["skipped"] is (cause != "label")
        if cause == "label":
            assert worst > max(norms.values())
            continue
        assert worst is None
        assert FOUND[cause] in body["nonfinite"], cause
