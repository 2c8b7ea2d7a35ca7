"""Ranks that use different parts of a model: the bits of plain PyTorch, and one order of all collectives on every rank.

The same models as in tests/distributed/test_parameters, where real ranks would wait for each other; here the joint
order is compared itself, with a rank that is late and one that finds everything done as soon as it asks.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from uneven import WIDTH, EveryBlockOnAnotherRank, ExpertsAlone, Mixture, SkippedBlocks, Uneven

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Losses, Plain, assert_same, engine_on
from zerotrain.comm.world import World

NUM_STEPS = 2


class Small(Uneven):
    num_blocks = 4


class OneLinear(Small):
    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x, uses_second=not (index == 2 and rank == 0))


class CalledTwice(Small):
    """One block is called again behind the others; what it leaves out differs by rank and call."""

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = block(x, uses_second=(index + step) % 2 != rank)
        return self.blocks[1](x, uses_second=rank == 1) if index == 3 else x


class Recomputed(Small):
    """In a reentrant checkpoint: no hook announces the backward of a block before its recomputation begins."""

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        uses_second = index % 2 == rank
        return checkpoint(lambda x: block(x, uses_second=uses_second), x, use_reentrant=True)


class Gain(nn.Module):
    """A unit that makes a single node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Gains(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gain() for _ in range(4))


class TiedBlocks(Small):
    """A weight of the first block is one of the last, which a rank leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].second.weight = self.blocks[0].first.weight

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x, uses_second=not (index == 3 and rank == step % 2))


SMALL = [OneLinear, CalledTwice, Recomputed, Gains, TiedBlocks]
LARGE = [EveryBlockOnAnotherRank, SkippedBlocks, Mixture, ExpertsAlone]
SKIPS_UNITS = {SkippedBlocks}
"""Where a rank does not call a unit that others call its gathers differ in place: only each kind has one order."""


def inputs(step: int, rank: int, micro_batch: int = 0) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))


def plainly(make: type[nn.Module], size: int, num_micro_batches: int) -> dict[str, torch.Tensor]:
    def losses(model: nn.Module, step: int, rank: int) -> Losses:
        for index in range(num_micro_batches):
            yield model(inputs(step, rank, index), rank=rank, step=step), 1.0

    return Plain(size, make, losses=losses).train(*range(NUM_STEPS))


def in_our_engine(make: type[nn.Module], size: int, num_micro_batches: int, zero: Any, **nasty: Any) -> Any:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, make, zero=zero)
        for step in range(NUM_STEPS):
            for index in range(num_micro_batches):
                loss = engine(inputs(step, world.rank, index), rank=world.rank, step=step)
                if index < num_micro_batches - 1:
                    with engine.no_sync():
                        engine.backward(loss)
                else:
                    engine.backward(loss)
            engine.step()
            assert engine.held.pools.lent_nbytes == 0
        state = engine.full_state_dict()
        return {name: state[name] for name, _ in engine.module.named_parameters()} if state else {}

    return run_threads(on_a_rank, size, **nasty)


def expect_the_bits_of_plain_pytorch_in_one_order(
    make: type[nn.Module], size: int, num_micro_batches: int, zero: Any, **nasty: Any
) -> None:
    results, board = in_our_engine(make, size, num_micro_batches, {"stage": 3} | zero, **nasty)
    assert_same(results[0], plainly(make, size, num_micro_batches))
    for kind in ("gather", "reduction") if make in SKIPS_UNITS else ("",):
        first, *others = [[each for each in order if each.startswith(kind)] for order in board.orders]
        assert others == [first] * (size - 1)


@pytest.mark.parametrize("make", SMALL)
def test_ranks_that_differ_have_one_order_with_a_bucket_for_each_parameter(make):
    expect_the_bits_of_plain_pytorch_in_one_order(make, 2, 1, {"bucket_mb": 0.0001}, late_rank=1, done_rank=0)


@pytest.mark.parametrize("bucket_mb", [0.002, 0.02])
@pytest.mark.parametrize("make", SMALL)
@pytest.mark.thinned(2)
def test_ranks_that_differ_have_one_order_with_larger_buckets_and_accumulation(make, bucket_mb):
    expect_the_bits_of_plain_pytorch_in_one_order(make, 3, 2, {"bucket_mb": bucket_mb, "prefetch": 2}, late_rank=2)


@pytest.mark.parametrize("make", LARGE)
def test_models_that_fill_the_wire_have_one_order(make):
    expect_the_bits_of_plain_pytorch_in_one_order(make, 2, 1, {"bucket_mb": 0.002}, late_rank=0)
