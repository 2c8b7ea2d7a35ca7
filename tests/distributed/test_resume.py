"""A run that goes on at another stage and on another number of ranks is the run that never stopped."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import trainer_of
from test_training import TEXT, on_ragged_text

import zerotrain
from tests.ranks import run_ranks
from zerotrain.training import warmup_cosine
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

OPTIMIZERS = {
    "fp32": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "bf16": zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01),
    "fp16": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
}
PLACEMENTS = [(3, 4), (1, 4), (3, 2), (0, 1), (2, 1)]


Outcome = tuple[str, list[dict[str, Any]], list[str]]
"""The hash of the weights, the lines of metrics.jsonl, and the last ones of steps.jsonl."""


def trained(folder: Path, stage: int, bucket_mb: float, resume: bool) -> list[Outcome]:
    """Of each precision, with dropout and labels that differ by row."""
    return [run(folder, name, stage, bucket_mb, resume) for name in OPTIMIZERS]


def run(folder: Path, precision: str, stage: int, bucket_mb: float, resume: bool) -> Outcome:
    world = zerotrain.World.current(torch.device("cpu"))
    torch.manual_seed(0 if not resume else 17 + world.rank)
    settings = {"precision": precision, "bucket_mb": bucket_mb, "activation_checkpointing": stage == 3, "world": world}
    engine, dataset = on_ragged_text(folder, stage, OPTIMIZERS[precision], **settings)
    first = folder / f"first-{precision}"
    run_dir = folder / f"{resume}-{world.size}-{stage}-{precision}" if resume else first
    if world.rank == 0:
        run_dir.mkdir()
    world.sum(torch.zeros(()))
    to_try = [first / "checkpoints" / "step-00000003"] if resume else []
    body = trainer_of(
        engine,
        dataset,
        run_dir,
        schedule=functools.partial(warmup_cosine, warmup_steps=1),
        max_steps=6,
        gradient_accumulation_steps=2,
        eval_every=2,
        checkpoint=CheckpointPolicy(every_steps=3, at_end=False, resume=to_try),
    ).run()
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    shown = ("step", "train_loss", "val_loss", "grad_norm", "lr", "loss_scale", "epoch", "tokens")
    steps = (run_dir / "steps.jsonl").read_text().splitlines()[-3:]  # behind where they were computed
    return body["weights_sha256"], [{name: line.get(name) for name in shown} for line in lines], steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of two ranks at stage 2 that never stopped; it saved in the middle."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(TEXT)
    return folder, run_ranks(trained, 2, folder, 2, 0.1, False)[0]


@pytest.mark.case(
    "stopping",
    "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
    "that differ, accumulation, AdamW, Muon, fp16",
    "weights, losses, norms and lines of metrics.jsonl of the run that never stopped",
)
@pytest.mark.case(
    "ranks", "a run of the Trainer: dropout, checkpointing, labels of which few count, Muon", "same weights"
)
@pytest.mark.parametrize(("stage", "num_ranks"), PLACEMENTS)
@pytest.mark.thinned(3)
def test_a_run_goes_on_at_any_stage_and_on_any_number_of_ranks(whole, stage: int, num_ranks: int) -> None:
    folder, wanted = whole
    assert run_ranks(trained, num_ranks, folder, stage, 0.02, True)[0] == wanted
