"""Wherever state lies between its uses, and wherever it lies after a restart, the bits are those of plain PyTorch.

There is no GPU here: `cpu` is memory apart from that which is computed with, by the same code as beside a GPU but for
the copies between the two.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import zerotrain
from tests.bits.test_kinds import OVERFLOWING
from tests.bits.training import Setup, Training, assert_same, in_plain_pytorch, on_ranks

TIERS = ("device", "cpu", "disk")
PLACES = {1: [(tier, "device") for tier in TIERS], 3: list(product(TIERS, TIERS))}
PLACES[2] = PLACES[1]
STARTS = [(stage, *places) for stage in (1, 2, 3) for places in PLACES[stage]]
"""(stage, optimizer, parameters)"""
OTHER_RANKS = {1: 2, 2: 1, 3: 3}
VIRTUAL_RANKS = {1: 4, 2: 4, 3: 3}


def setup_of(start: tuple[int, str, str], num_ranks: int, folder: Path, *, keep: float) -> Setup:
    stage, optimizer, parameters = start
    offload = zerotrain.OffloadConfig(optimizer, parameters, keep=keep, path=str(folder))
    return Setup(num_ranks, stage, offload=offload)


@pytest.mark.case(
    "offload: Offload",
    "every place, at stages 1 to 3, fp32 and bf16, 1 to 3 ranks, accumulated; resumed from another place in mid-run",
    "same bits",
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thinned(3)
def test_every_place_and_a_restart_in_every_other(
    precision: str, num_micro_batches: int, num_ranks: int, tmp_path: Path
) -> None:
    training = Training(
        virtual_ranks=VIRTUAL_RANKS[num_ranks],
        precision=precision,
        num_micro_batches=num_micro_batches,
        max_grad_norm=0.05,
        num_steps=4,
    )
    wanted = in_plain_pytorch(training)
    different = []
    for number, start in enumerate(STARTS):
        keep = (0.0, 0.4)[number % 2]
        saved = tmp_path / str(number)
        setup = replace(setup_of(start, num_ranks, tmp_path / "disk", keep=keep), saves_to=saved)
        if on_ranks(training, setup).sha256 != wanted.sha256:
            different.append((start, "to its end"))
        # Each once, in another order, so that over all it comes behind many.
        then = STARTS[(7 * number + 3 * num_ranks + num_micro_batches) % len(STARTS)]
        again = replace(setup_of(then, OTHER_RANKS[num_ranks], tmp_path / "disk", keep=0.4 - keep), goes_on_from=saved)
        if on_ranks(training, again).sha256 != wanted.sha256:
            different.append((start, then))
    assert different == []


KINDS = {
    "fp16 that overflows": OVERFLOWING,
    "frozen in mid-run": Training(
        virtual_ranks=4, precision="bf16", frozen={1: "blocks.1.", 2: "blocks.1."}, num_steps=5
    ),
    "Muon": Training(virtual_ranks=4, precision="bf16", muon=True, max_grad_norm=0.05, num_steps=5),
}


@pytest.mark.case(
    "offload: Offload",
    "fp16 that overflows, parameters frozen in mid-run, Muon, the stage changed on the way",
    "same bits",
)
@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_kinds_of_training_with_the_stage_changing_on_the_way(kind: str, tier: str, tmp_path: Path) -> None:
    offload = zerotrain.OffloadConfig(tier, tier, keep=0.3, path=str(tmp_path))
    for num_ranks, stages in ((1, {}), (2, {2: 1, 4: 3}), (4, {1: 2, 3: 0, 4: 1})):
        assert_same(KINDS[kind], Setup(num_ranks, 3, offload=offload, stages=stages, is_late=num_ranks > 1))
