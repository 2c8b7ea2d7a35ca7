"""The order of gathers and reductions, with threads as ranks: on every rank the same, whatever gradients it has."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from uneven import WIDTH, EveryBlockOnAnotherRank, Mixture, OneLinearOfOneRank, SkippedBlocks, TwoLinears, Uneven

import zerotrain
from tests.bits.training import Net, Setup, Training, assert_same
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import seeded

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ONE_EACH = 0.009
"""MiB: each block of `Uneven` a bucket of its own."""


def build(make: Callable[[], nn.Module], world: zerotrain.World, **zero: Any) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(seeded(make), optimizer=SGD, zero=zerotrain.ZeroConfig(**zero), world=world)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def train(make: Callable[[], nn.Module], world: zerotrain.World, *, num_steps: int = 2, **zero: Any) -> str:
    engine = build(make, world, **zero)
    for step in range(num_steps):
        engine.backward(engine(inputs(step, world.rank), rank=world.rank, step=step))
        engine.step()
    return engine.weights_sha256()


class Three(Uneven):
    num_blocks = 3


def orders_of(make: Callable[[], nn.Module], size: int = 2, **settings: Any) -> list[list[str]]:
    """By rank, what it issued in one step."""
    zero = {name: value for name, value in settings.items() if name not in ("late_rank", "done_rank")}
    ranks = {name: value for name, value in settings.items() if name in ("late_rank", "done_rank")}
    _, board = run_threads(lambda world: train(make, world, num_steps=1, **zero), size, **ranks)
    return [[each for each in order if "master weights of" not in each] for order in board.orders]


FORWARD = ["gather root", "gather blocks.0", "gather blocks.1", "gather blocks.2"]


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (
            {"stage": 0},
            # Two reductions of the largest bucket may be on the wire; then the oldest makes way, with its gather.
            [
                *("reduction blocks.2", "reduction blocks.1", "gather the gradient of blocks.2", "reduction blocks.0"),
                *("gather the gradient of blocks.1", "reduction root"),
                *("gather the gradient of blocks.0", "gather the gradient of root"),
            ],
        ),
        ({"stage": 2}, ["reduction blocks.2", "reduction blocks.1", "reduction blocks.0", "reduction root", *FORWARD]),
        (
            {"stage": 3},
            # The last unit and the root stay full. The gather of a unit is issued while the one behind it computes, and
            # the reduction of that one before the next gather.
            [
                *FORWARD,
                *("gather blocks.1", "reduction blocks.2", "gather blocks.0", "reduction blocks.1"),
                *("reduction blocks.0", "reduction root"),
            ],
        ),
        (
            {"stage": 3, "prefetch": 0},
            [
                *FORWARD,
                *("reduction blocks.2", "gather blocks.1", "reduction blocks.1", "gather blocks.0"),
                *("reduction blocks.0", "reduction root"),
            ],
        ),
        (
            {"stage": 3, "reshard_after_forward": False},
            [*FORWARD, "reduction blocks.2", "reduction blocks.1", "reduction blocks.0", "reduction root"],
        ),
    ],
    ids=str,
)
def test_the_order_of_a_step(zero, expected):
    for order in orders_of(Three, bucket_mb=ONE_EACH, **zero):
        assert order[: len(expected)] == expected


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [OneLinearOfOneRank, EveryBlockOnAnotherRank, Mixture])
@pytest.mark.thinned(2, first=1)
def test_both_groups_have_one_order_on_all_ranks_whatever_gradients_each_has(make, size):
    for stage in range(4):
        bucket_mb = (0.004, ONE_EACH)[(stage + size) % 2]
        first, *others = orders_of(make, size, stage=stage, bucket_mb=bucket_mb, late_rank=size - 1, done_rank=0)
        assert all(order == first for order in others), (stage, bucket_mb)


def test_a_rank_that_skips_a_unit_has_the_gathers_and_the_reductions_of_the_others_each_in_their_order():
    for stage in range(4):
        first, second = orders_of(SkippedBlocks, stage=stage, bucket_mb=0.004)
        for kind in ("gather", "reduction"):
            assert [each for each in first if each.startswith(kind)] == [
                each for each in second if each.startswith(kind)
            ]


class Checkpointed(EveryBlockOnAnotherRank):
    """Each block is computed again in the backward, by torch's own checkpoint."""

    use_reentrant = False

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return super(Checkpointed, self).call(index, block, x, rank, step)

        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Twice(EveryBlockOnAnotherRank):
    """Two forwards, one backward, as in preference training."""

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return super().forward(x, **how) + super().forward(2 * x, **how)


class AuxiliaryLoss(EveryBlockOnAnotherRank):
    """A loss leaves each unit by an attribute, computed behind its output."""

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return super().forward(x, **how) + sum(block.extra for block in self.blocks)

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = super().call(index, block, x, rank, step)
        block.extra = block.first.weight.square().mean() * x.mean()
        return x


class ReadFromOutside(EveryBlockOnAnotherRank):
    """The model reads a parameter of a unit without calling it, before any unit runs."""

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return super().forward(x, **how) + self.blocks[5].second.weight.square().mean()


class LateLoss(TwoLinears):
    """Computes a loss behind its output: at stage 3 it stays full until the backward."""

    def forward(self, x: torch.Tensor, uses_second: bool = True) -> torch.Tensor:
        output = super().forward(x, uses_second)
        self.loss = super().forward(x, uses_second).square().mean()
        return output


class LateLossesBackwards(EveryBlockOnAnotherRank):
    """Calls its blocks in the reverse order of their list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LateLoss() for _ in range(self.num_blocks))

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return super().forward(x, **how) + sum(block.loss for block in self.blocks)

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return super().call(index, self.blocks[self.num_blocks - 1 - index], x, rank, step)


UNUSUAL = [Checkpointed, CheckpointedReentrant, Twice, AuxiliaryLoss, ReadFromOutside, LateLossesBackwards]


@pytest.mark.parametrize("make", UNUSUAL)
def test_models_whose_backward_is_unusual_have_one_order_too_and_the_bits_of_stage_0(make):
    hashes = set()
    for stage, bucket_mb in ((0, 25.0), (3, 0.004), (3, ONE_EACH)):
        train_it = functools.partial(train, make, num_steps=2, stage=stage, bucket_mb=bucket_mb)
        results, board = run_threads(lambda world, train_it=train_it: train_it(world), 2, late_rank=1)
        assert board.orders[0] == board.orders[1], (stage, bucket_mb)
        hashes.update(results)
    assert len(hashes) == 1


def test_a_forward_whose_loss_is_thrown_away_or_comes_later_changes_no_bit():
    def asides(world: zerotrain.World, stage: int) -> str:
        engine = build(EveryBlockOnAnotherRank, world, stage=stage, bucket_mb=0.004)
        for step in range(2):
            how = {"rank": world.rank, "step": step}
            engine(inputs(7, world.rank), **how)  # its graph is freed at once
            kept = engine(inputs(8, world.rank), **how)  # its graph lives on
            with engine.no_sync():
                engine.backward(engine(inputs(step, world.rank), **how))
            engine.backward(engine(inputs(step + 1, world.rank), **how))
            engine.backward(kept)
            engine.step()
        return engine.weights_sha256()

    hashes = [run_threads(functools.partial(asides, stage=stage), 2)[0] for stage in (0, 2, 3)]
    assert len({each for by_rank in hashes for each in by_rank}) == 1


@pytest.mark.case("parameters", "complete blocks skipped on one rank, as layer drop does *")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("prefetch", "skipped"), [(1, (2,)), (1, (0,)), (1, (1, 3)), (2, (1, 2)), (2, (2, 3))])
def test_a_rank_that_skips_blocks_issues_what_the_others_do_in_the_same_order(prefetch, skipped, overlap):
    """As many in a row as are gathered ahead. Rank 1 of 2 skips them."""
    make = functools.partial(Net, skips=lambda block, place: block in skipped and place[1] == 1)
    training = Training(make=make, virtual_ranks=2, num_micro_batches=1, num_steps=2)
    assert_same(training, Setup(2, 3, overlap, more={"prefetch": prefetch}))


@pytest.mark.case("calls: Calls", "Parts of the model alone")
def test_a_part_of_the_model_that_is_called_between_engine_calls_is_refused_where_weights_are_sharded():
    engine = build(Three, zerotrain.World.current(torch.device("cpu")), stage=3, bucket_mb=ONE_EACH)
    with pytest.raises(zerotrain.EngineStateError, match="was called between engine calls"):
        engine.module.blocks[1](torch.zeros(1, WIDTH))
    with engine.forward_scope():
        engine.module.blocks[1](torch.zeros(1, WIDTH))
