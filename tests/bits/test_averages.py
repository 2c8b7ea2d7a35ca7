"""The moving average of weights at every stage, on 1 to 3 ranks, and from any checkpoint: the bits of torch's own
average of the full weights after each step, and a training that does not know of it."""

from itertools import product
from pathlib import Path

import pytest

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, build, train
from tests.unit.engine.test_average import DECAY, Plain, assert_average, followed


@pytest.mark.case(
    "checkpoints",
    "at stages 0 to 3 on 1 to 3 ranks; tied, frozen, odd parameters, AdamW, momentum, Muon, adapters on a frozen base; "
    "fp32, bf16, fp16 with a skipped step",
    "the bits of `get_ema_multi_avg_fn` on the full fp32 weights after each step; the weights are those of a training "
    "without it",
    under="`engine.keep_average()`, `with engine.averaged():`",
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_it_is_that_of_torch_at_every_stage_and_changes_no_bit(kind: str, size: int) -> None:
    def on_a_rank(world: zerotrain.World, stage: int) -> str:
        engine, plain = build(world, KINDS[kind], stage), Plain()
        engine.keep_average(decay=DECAY, warmup=False)
        for step in range(4):
            followed(engine, plain, step, of_rank=world.rank)
            if step % 2:
                before = engine.weights_sha256()
                assert_average(engine, plain)
                assert engine.weights_sha256() == before
        return engine.weights_sha256()

    def without(world: zerotrain.World) -> str:
        engine = build(world, KINDS[kind], 2)
        train(engine, 0, 1, 2, 3, of_rank=world.rank)
        return engine.weights_sha256()

    expected = run_threads(without, size)[0]
    for stage in range(4):
        assert run_threads(lambda world, stage=stage: on_a_rank(world, stage), size, late_rank=size - 1)[0] == expected


@pytest.mark.case(
    "checkpoints", "saved at each stage, loaded at each other on another number of ranks", "the same bits",
    under="`engine.keep_average()`, `with engine.averaged():`",
)  # fmt: skip
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["hard parameters, bf16, momentum", "Muon and AdamW"])
def test_every_placement_loads_that_of_every_other(kind: str, stage: int, tmp_path: Path) -> None:
    plain = Plain()

    def save(world: zerotrain.World) -> None:
        engine = build(world, KINDS[kind], stage)
        engine.keep_average(decay=DECAY, warmup=False)
        followed(engine, plain if world.rank == 0 else Plain(), 0, 1)
        engine.save(tmp_path / "saved")

    def resume(world: zerotrain.World, later: int) -> None:
        engine = build(world, KINDS[kind], later, seed=1, bucket_mb=0.002)
        engine.keep_average(decay=DECAY, warmup=False)
        engine.load(tmp_path / "saved")
        assert_average(engine, plain)

    run_threads(save, 1 + (stage + 1) % 3)
    for later, size in product(range(4), [1 + stage % 3]):
        run_threads(lambda world, later=later: resume(world, later), size)
