"""A step's launches on a GPU: so many for each bucket, none for each element, and one wait of the host."""

from collections import Counter

import pytest
import torch

from tests.streams.stand_in import SimulatedEvent, clocks, run_on_streams
from tests.streams.trainings import build, net, rows
from zerotrain.comm.world import World
from zerotrain.engine.buckets.norm import block_squares
from zerotrain.settings import OffloadConfig

MOST_PER_BUCKET = {"native": 14, "fp32": 19, "ordered": 24}
"""By the reduction, at stage 3, where a bucket is gathered twice. One of them takes back the number of the step, which
torch counts before it knows on the device that the step is skipped."""
NUM_BLOCKS, WIDTH = 4, 64
OneStep = tuple[int, Counter[str], Counter[str]]
"""Buckets, kernels by name, waits of the host by what waited."""


def one_step(
    stage: int,
    *,
    width: int = WIDTH,
    num_blocks: int = NUM_BLOCKS,
    one_bucket: bool = False,
    num_ranks: int = 2,
    **given: object,
) -> OneStep:
    """The second step of a training, of one micro-batch."""
    block_mb = (width**2 + 2 * width) * 2 / 2**20
    bucket_mb = 100.0 if one_bucket else 1.3 * block_mb

    def on_a_rank(world: World) -> OneStep:
        engine = build(world, stage, net(width, num_blocks), bucket_mb=bucket_mb, **given)  # type: ignore[arg-type]
        known = clocks()
        for step in range(2):
            batch = rows(step, 0, world.rank, width)
            kernels, syncs = Counter(known.kernels), Counter(known.syncs)
            engine.backward(engine(batch))
            engine.step()
        return len(engine.schedule.buckets), known.kernels - kernels, known.syncs - syncs

    found: OneStep = run_on_streams(on_a_rank, num_ranks).results[0]
    return found


@pytest.mark.parametrize(("stage", "reduction"), [(0, "native"), (1, "fp32"), (3, "native"), (3, "ordered")])
def test_a_bucket_more_is_a_few_kernels_more_and_the_host_waits_once_a_step(stage, reduction):
    few, kernels_of_few, _ = one_step(stage, reduction=reduction, one_bucket=True)
    many, kernels_of_many, syncs = one_step(stage, reduction=reduction)
    assert (few, many) == (1, NUM_BLOCKS)
    per_bucket = (kernels_of_many.total() - kernels_of_few.total()) / (many - few)
    assert per_bucket <= MOST_PER_BUCKET[reduction], kernels_of_many - kernels_of_few
    assert syncs == {"event": 1}  # the numbers of the norm have come


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_when_the_host_waits_the_device_has_its_update_to_do(reduction, stage, monkeypatch):
    """All that comes behind the wait are gathers of what was updated."""
    told: list[int] = []
    waits = SimulatedEvent.synchronize

    def synchronize(event: SimulatedEvent) -> None:
        told.append(clocks().kernels.total())
        waits(event)

    def on_a_rank(world: World) -> tuple[int, int]:
        engine = build(world, stage, reduction=reduction)
        for step in range(2):
            engine.backward(engine(rows(step, 0, world.rank)))
            if step == 0:
                engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(SimulatedEvent, "synchronize", synchronize)
            engine.step()
        return clocks().kernels.total() - told[-1], len(engine.schedule.buckets)

    behind, num_buckets = run_on_streams(on_a_rank, 1).results[0]
    assert len(told) == 1
    assert behind == (num_buckets if stage in (1, 2) else 0)


@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_no_kernel_comes_with_more_elements(reduction):
    narrow, wide = (
        one_step(2, width=width, num_blocks=2, one_bucket=True, reduction=reduction) for width in (512, 768)
    )
    assert wide[:2] == narrow[:2]


@pytest.mark.parametrize(("exact", "most"), [(False, 3), (True, 8)])
def test_the_norm_of_a_bucket_takes_few_kernels_however_large_it_is(exact, most):
    def on_a_rank(_: World) -> int:
        shard = torch.ones(2**20)
        before = clocks().kernels.total()
        assert block_squares(shard, exact=exact).sqrt().max() == (8.0 if exact else 2.0**10)
        return clocks().kernels.total() - before - 4  # those of the line above

    (kernels,) = run_on_streams(on_a_rank, 1).results
    assert kernels == most


def test_windows_are_waited_for_by_streams_and_not_by_the_host():
    _, _, syncs = one_step(3, offload=OffloadConfig(optimizer="cpu", parameters="cpu"))
    assert syncs == {"event": 1}  # the numbers of the norm have come
