"""Promise 1 under the worst timing: one rank late at every gather, reduction or step changes no bit."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    Case,
    batch,
    be_late,
    build,
    make_model,
    micro_batches,
    place,
    post_no_receives,
    reference_weights,
    run_over,
    sha256,
)
from torch import nn

from zerotrain.comm.handles import Handle
from zerotrain.settings import ZeroConfig
from zerotrain.testing import run_ranks

DELAY_S = 0.03
CASE = Case(ZeroConfig(bucket_mb=0.45), num_steps=2)
"""Three buckets: the head, two blocks, one block."""


def train_late(stages: list[int], late_rank: int, late_at: str) -> list[str]:
    """Train at each stage with `late_rank` asleep before each call of one kind."""
    rank, size = place()
    hashes = []
    for stage in stages:
        engine = build(CASE.with_zero(stage=stage))
        if rank == late_rank:
            be_late(engine, (late_at,), DELAY_S)
        if rank == late_rank and late_at == "step":
            for bucket in engine.schedule.trained:
                bucket.update.renew = after_a_sleep(bucket.update.renew)
        for step in range(CASE.num_steps):
            engine.train_step(micro_batches(batch(step, size, 1), rank))
        hashes.append(engine.weights_sha256())
    return hashes


def after_a_sleep(on_time: Any) -> Any:
    def late(*args: Any) -> Any:
        time.sleep(DELAY_S)
        return on_time(*args)

    return late


@pytest.mark.case(
    "hosts: Ranks of one host",
    "every stage, precision and size of buckets; 2, 3, 4, 6, 9 ranks; accumulation, a late rank",
)
@pytest.mark.parametrize("late_at", ["gather", "reduction", "step"])
def test_a_rank_that_is_late_changes_no_bit(late_at: str) -> None:
    expected = sha256(reference_weights(CASE, 2))
    for late_rank in (0, 1):
        for hashes in run_ranks(train_late, 2, [0, 1, 2, 3], late_rank, late_at):
            assert hashes == [expected] * 4


NATIVE = CASE.with_zero(reduction="native", bucket_mb=0.05)
"""Whether gloo's own reduce-scatter is done can be asked, which cannot be said of an ordered reduction on gloo."""


def be_done_on_rank_0_alone() -> None:
    """From now on a collective is done on rank 0 as soon as that asks, and on no other rank before it waits. Gathers
    are gloo's own, as of many ranks, and not sends and receives, whose order does not matter."""
    post_no_receives()

    def is_done(handle: Handle) -> bool:
        if dist.get_rank() == 0:
            handle.wait()
        return dist.get_rank() == 0

    assert hasattr(Handle, "is_done")
    setattr(Handle, "is_done", is_done)  # noqa: B010


class SumOverRanks(torch.autograd.Function):
    """A model's own collective, as batch norm over ranks has one: the mean of the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        mean = gradient.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        for block in self.inner.blocks:
            block.register_forward_hook(lambda _module, _inputs, output: SumOverRanks.apply(output))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)


def collectives_of_the_model(stage: int) -> str:
    be_done_on_rank_0_alone()
    rank, size = place()
    engine = build(NATIVE.with_zero(stage=stage), Summing())
    for step in range(2):
        engine.train_step(micro_batches(batch(step, size, 1), rank))
    return engine.weights_sha256()


def test_a_reduction_that_is_done_on_one_rank_alone_stays_in_order_with_the_collectives_of_the_model() -> None:
    hashes = [sha256_ for by_rank in run_over([0, 1, 2, 3], collectives_of_the_model, 2) for sha256_ in by_rank]
    assert len(set(hashes)) == 1


def failed_backward(stage: int) -> str:
    """The second of three steps breaks off in the middle of its backward."""
    be_done_on_rank_0_alone()
    rank, size = place()
    engine = build(NATIVE.with_zero(stage=stage))
    for step in (0, None, 1):
        if step is not None:
            engine.train_step(micro_batches(batch(step, size, 1), rank))
            continue
        hook = engine.module.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            engine.train_step(micro_batches(batch(0, size, 1), rank))
        hook.remove()
    return engine.weights_sha256()


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_backward_that_fails_ends_alike_where_a_reduction_is_done_on_one_rank_alone() -> None:
    hashes = [hash_ for by_rank in run_over([0, 1, 2, 3], failed_backward, 2) for hash_ in by_rank]
    assert len(set(hashes)) == 1
