"""A mesh of shards x replicas has the bits of plain PyTorch, and so those of the flat plan: its hosts are subtrees."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import zerotrain
from tests.bits.test_any_number_of_ranks import WAYS, Way, training_of
from tests.bits.training import (
    DTYPES,
    FINE_MB,
    WHOLE_MB,
    Setup,
    Training,
    assert_same,
    batch,
    build,
    in_plain_pytorch,
    on_ranks,
)
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.test_average import DECAY

MESHES = [(4, 2), (8, 4), (8, 2), (6, 2)]
"""(ranks, of which hold sharded parameters once); six are three hosts of two."""


def on_mesh(shard_size: int | None, **more: object) -> dict[str, object]:
    return {"shard_size": shard_size, **more}


@pytest.mark.case(
    "ranks",
    "`zero.shard_size`: 2x2, 4x2, 2x4 and 2x3 ranks at every stage, fp32, bf16, fp16; dropout, accumulation, clipping, "
    "Muon, overlap on and off, a late rank, virtual ranks",
    "the bits of plain PyTorch, and so those without a mesh",
)
@pytest.mark.parametrize(("num_ranks", "shard_size"), MESHES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.thinned(16)
def test_it_ends_with_the_weights_of_plain_pytorch(
    way: Way, precision: str, stage: int, num_ranks: int, shard_size: int
) -> None:
    virtual_ranks = 6 if num_ranks == 6 else 8
    bucket_mb = FINE_MB if way.fine else WHOLE_MB
    assert_same(
        training_of(way, virtual_ranks, precision),
        Setup(num_ranks, stage, way.overlap, bucket_mb, way.is_late, more=on_mesh(shard_size)),
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_two_by_two_ranks_in_bf16_with_a_late_one(stage: int) -> None:
    assert_same(Training(virtual_ranks=4, precision="bf16"), Setup(4, stage, is_late=True, more=on_mesh(2)))


ROUND = {1: 3, 2: 0, 3: 2, 4: 3, 5: 1}
STARTS = [(stage, size) for stage in (1, 2, 3) for size in (None, 2)]


@pytest.mark.case(
    "checkpoints",
    "`zero.shard_size`: saved on 2x2 ranks or on 4 without a mesh, at stages 1 to 3, with offloaded state or without; "
    "loaded by the other, on 8 as 4x2, at another stage",
    "the same bits",
)
@pytest.mark.parametrize("tier", ["device", "cpu", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thinned(3)
def test_a_checkpoint_goes_on_in_every_mesh(precision: str, tier: str, tmp_path: Path) -> None:
    training = Training(precision=precision, max_grad_norm=0.05, num_steps=4)
    wanted, different = in_plain_pytorch(training).sha256, []
    for number, (stage, shard_size) in enumerate(STARTS):
        saved = tmp_path / str(number)
        setup = Setup(4, stage, more=on_mesh(shard_size), saves_to=saved, offload=offload_to(tier, stage, tmp_path))
        if on_ranks(training, setup).sha256 != wanted:
            different.append((stage, shard_size, "to its end"))
        later, size = STARTS[(number + 3) % len(STARTS)]
        for num_ranks, other_size in ((4, size), (8, 4))[number % 2 :][:1]:
            offload = offload_to(tier, later, tmp_path)
            again = Setup(num_ranks, later, more=on_mesh(other_size), goes_on_from=saved, offload=offload)
            if on_ranks(training, again).sha256 != wanted:
                different.append((stage, shard_size, later, num_ranks, other_size))
    assert different == []


def offload_to(tier: str, stage: int, folder: Path) -> zerotrain.OffloadConfig | None:
    return zerotrain.OffloadConfig(tier, tier if stage == 3 else "device", keep=0.3, path=str(folder / "disk"))


@pytest.mark.case(
    "checkpoints", "on 2x2 ranks through 1-3-0-2-3-1, with frozen blocks, Muon, each micro-batch reduced",
    "the weights of plain PyTorch", under="`zero.schedule` changes the stage in mid-run",
)  # fmt: skip
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.thinned(2)
def test_the_stage_changes_on_a_mesh(precision: str, muon: bool) -> None:
    training = Training(
        virtual_ranks=4,
        precision=precision,
        max_grad_norm=0.1,
        muon=muon,
        frozen={} if muon else {2: "blocks.0", 3: "blocks.0"},
        num_steps=6,
    )
    assert_same(training, Setup(4, 1, is_late=True, stages=ROUND, more=on_mesh(2)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_reduced_one_by_one_have_the_bits_without_a_mesh(precision: str) -> None:
    training = Training(virtual_ranks=4, precision=precision, num_micro_batches=3, max_grad_norm=0.1)
    hashes = {
        on_ranks(training, Setup(4, stage, bucket_mb=mb, more=on_mesh(size, accumulate="reduced"))).sha256
        for stage, size, mb in ((2, None, FINE_MB), (0, 2, FINE_MB), (1, 2, WHOLE_MB), (3, 2, FINE_MB))
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_reads_a_weight_alone_between_two_steps(stage: int) -> None:
    """The others wait for it elsewhere, as in a barrier of the user's."""
    training = Training(virtual_ranks=4, num_micro_batches=1)

    def on_a_rank(world: zerotrain.World) -> str:
        engine = build(training, Setup(4, stage, more=on_mesh(2)), world)
        for step in range(2):
            engine.train_step([(batch((step, world.rank, 0)), (step, world.rank, 0))])
            if world.rank == 1:
                assert engine.module.output.weight.isfinite().all()
            engine.collectives.gather_small(torch.ones(1), name="barrier")
        return engine.weights_sha256()

    run_threads(on_a_rank, 4, in_turns=True)


def test_weights_are_replaced_right_behind_a_step() -> None:
    """While what the replicas of a late rank get is on the wire."""
    training = Training(virtual_ranks=4, num_micro_batches=1, num_steps=1)
    wanted = in_plain_pytorch(replace(training, num_steps=2)).weights

    def on_a_rank(world: zerotrain.World) -> bool:
        engine = build(training, Setup(4, 3, more=on_mesh(2)), world)
        engine.train_step([(batch((0, world.rank, 0)), (0, world.rank, 0))])
        engine.load_state_dict(wanted if world.rank == 0 else {})
        state = engine.full_state_dict()
        return all(torch.equal(value, wanted[name]) for name, value in state.items())

    assert all(run_threads(on_a_rank, 4, late_rank=3, in_turns=True)[0])


def test_an_average_and_what_a_user_writes_are_those_without_a_mesh() -> None:
    """One weight is clamped in place after each step, and average and weights change places between steps."""
    training = Training(virtual_ranks=4, precision="bf16", num_micro_batches=1)

    def on_a_rank(stage: int, size: int | None, world: zerotrain.World) -> tuple[str, str, list[bool]]:
        engine = build(training, Setup(4, stage, more=on_mesh(size)), world)
        engine.keep_average(decay=DECAY, warmup=False)
        outputs = []
        for step in range(4):
            place = (step, world.rank, 0)
            engine.train_step([(batch(place), place)])
            with torch.no_grad(), engine.forward_scope():
                engine.module.output.weight.clamp_(-0.2, 0.2)
            with engine.averaged(), torch.no_grad():
                outputs.append(engine(batch(place), (0, 0, 0)).item())
        with engine.averaged():
            average = engine.weights_sha256()
        return engine.weights_sha256(), average, outputs

    runs = [
        run_threads(partial(on_a_rank, stage, size), 4, late_rank=2, in_turns=True)[0]
        for stage, size in ((2, None), (2, 2), (3, 2))
    ]
    assert all(run == runs[0] for run in runs)
