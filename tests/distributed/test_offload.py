"""Offloading on real ranks: the hardest of tests/bits/test_offloading.py, on the disk and over the wire of a run."""

from pathlib import Path

import pytest
import torch
from cases import OPTIMIZERS, batch, make_model, micro_batches, place

import zerotrain
from tests.ranks import run_ranks

VIRTUAL_RANKS, NUM_STEPS, SAVED_AT = 2, 4, 2
DEVICE = zerotrain.OffloadConfig()


def trained(stage: int, offload: zerotrain.OffloadConfig, folder: Path, saved_at: int, steps: range) -> str:
    """bf16, two micro-batches, clipped; saved before a step, or gone on from there."""
    torch.manual_seed(steps.start)
    engine = zerotrain.build_engine(
        make_model(),
        optimizer=OPTIMIZERS["adamw"],
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.05),
        precision="bf16",
        offload=offload,
        max_grad_norm=0.5,
        virtual_ranks=VIRTUAL_RANKS,
    )
    if steps.start:
        engine.load(folder)
    rank, size = place()
    for step in steps:
        if step == saved_at:
            save = engine.begin_save(folder, staging_nbytes=0)
        tokens = batch(step, VIRTUAL_RANKS, 2)
        engine.train_step([each for leaf in range(rank, VIRTUAL_RANKS, size) for each in micro_batches(tokens, leaf)])
        if step == saved_at:
            save.wait()
    return engine.weights_sha256()


def on_two_ranks(folder: Path) -> list[str]:
    """Without offloading; all on a disk, and saved there beside the training; gone on from it by halves."""
    disk = zerotrain.OffloadConfig("disk", "disk", path=str(folder / "disk"))
    half = zerotrain.OffloadConfig("disk", "cpu", keep=0.5, path=str(folder / "disk"))
    return [
        trained(2, DEVICE, folder, NUM_STEPS, range(NUM_STEPS)),
        trained(3, disk, folder / "saved", SAVED_AT, range(NUM_STEPS)),
        trained(3, half, folder / "saved", NUM_STEPS, range(SAVED_AT, NUM_STEPS)),
    ]


@pytest.mark.case(
    "offload: Offload",
    "every place, at stages 1 to 3, fp32 and bf16, 1 to 3 ranks, accumulated; resumed from another place in mid-run",
)
def test_a_run_on_a_disk_and_one_that_goes_on_from_it_elsewhere_have_the_bits_of_none(tmp_path: Path) -> None:
    (found, other) = run_ranks(on_two_ranks, 2, tmp_path)
    assert found == other
    cpu = zerotrain.OffloadConfig("cpu", update="host")
    alone = run_ranks(trained, 1, 1, cpu, tmp_path / "saved", NUM_STEPS, range(SAVED_AT, NUM_STEPS))
    assert {*found, *alone} == {found[0]}
    assert list((tmp_path / "disk").iterdir()) == []
