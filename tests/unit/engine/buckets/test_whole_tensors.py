"""Tensors that travel to the ranks that update them, and back. What is expected is counted in whole numbers."""

from collections import Counter

import pytest
import torch

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import CPU
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPool
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.engine.buckets.whole_tensors import Updates, WholeTensors
from zerotrain.sharding.layout import BucketLayout

SHAPES = [(10, 20), (20, 10), (7, 3), (16, 16), (5,)]
"""Four that are updated whole, and one that is not."""


class OnARank:
    """A bucket whose weights count up and whose gradient counts up in thousands."""

    def __init__(self, world: World, owners: list[int], *, is_sharded: bool = True) -> None:
        self.layout = BucketLayout.pack(SHAPES, world.size)
        numel = self.layout.padded_numel
        self.weights, self.gradients = torch.arange(float(numel)), 1000 * torch.arange(float(numel))
        where = self.layout.shard(world.rank) if is_sharded else slice(0, numel)
        self.ledger = Ledger()
        self.pool = ScratchPool(dtype=torch.float32, device=CPU)
        self.master, self.gradient = self.weights[where].clone(), self.gradients[where].clone()
        self.whole = WholeTensors(
            "bucket",
            self.master,
            self.layout,
            is_sharded=is_sharded,
            owners=owners,
            collectives=Collectives(world, ledger=self.ledger, ordered=True, overlap=True),
            pool=self.pool,
        )
        self.seen: list[tuple[int, ...]] = []

    def step(self, updates: Updates) -> None:
        for target, gradient in updates:
            self.seen.append(tuple(target.shape))
            target.sub_(2 * gradient).add_(target.shape[0])  # something that knows the shape

    def run(self) -> None:
        for _ in self.whole.update(self.gradient, self.step):
            self.gradient.fill_(float("nan"))  # it was read before this

    def expected(self) -> torch.Tensor:
        expected = self.weights.clone()
        for slot in self.layout.slots[:4]:
            expected[slot.offset : slot.end] -= 2 * self.gradients[slot.offset : slot.end] - slot.shape[0]
        return expected


OWNERS = {"each has one": [2, 0, 1, 1], "one has all": [1, 1, 1, 1], "the last are first": [2, 2, 1, 0]}


@pytest.mark.parametrize("late_rank", [None, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
def test_every_tensor_is_updated_once_whole_by_its_owner_and_comes_back_to_where_it_lies(owners, size, late_rank):
    owners = [min(owner, size - 1) for owner in owners]

    def on_a_rank(world: World) -> OnARank:
        rank = OnARank(world, owners)
        if size > 1:
            rank.run()
        else:
            list(rank.whole.update(rank.gradient, rank.step))
        return rank

    ranks, _ = run_threads(on_a_rank, size, late_rank=late_rank)
    assert torch.equal(torch.cat([rank.master for rank in ranks]), ranks[0].expected())
    for index, rank in enumerate(ranks):
        assert rank.seen == [shape for shape, owner in zip(SHAPES, owners, strict=False) if owner == index]
        assert rank.pool.lent_nbytes == 0
        assert rank.ledger.outside_steps.nbytes["exchange"] == rank.whole.sent_nbytes
        assert all(target.untyped_storage().nbytes() == 4 for target in rank.whole.targets.values())


def test_each_byte_is_sent_three_times_but_those_that_their_owner_holds_anyway():
    def on_a_rank(world: World) -> tuple[int, Counter[str]]:
        rank = OnARank(world, [0, 0, 0, 0])
        rank.run()
        return rank.whole.sent_nbytes, rank.ledger.outside_steps.calls

    results, _ = run_threads(on_a_rank, 2)
    layout = BucketLayout.pack(SHAPES, 2)
    away = sum(max(0, slot.end - max(slot.offset, layout.shard_numel)) for slot in layout.slots[:4])
    assert [sent for sent, _ in results] == [4 * away, 4 * 2 * away]
    assert [calls["exchange"] for _, calls in results] == [2, 2]
