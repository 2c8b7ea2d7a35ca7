"""The weights of one bucket: whole, on their way, or this rank's part alone."""

import gc

import pytest
from torch import nn

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import CPU, OneBucket, alone
from zerotrain.comm.world import Shards, World
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.model.live_parameter import Owner, live_class, settle
from zerotrain.errors import EngineStateError


class Marked(nn.Parameter):
    """A class of somebody's own."""


def values_of(bucket: OneBucket) -> list[float]:
    return [value for parameter in bucket.parameters for value in parameter.detach().flatten().tolist()]


COUNTING = [float(value) for value in range(5 + 64 + 9)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reshard_frees_the_memory_of_sharded_parameters_alone(stage):
    bucket = OneBucket(alone(), stage=stage)
    weights = bucket.weights()
    whole, shard = 4 * bucket.layout.padded_numel, 4 * bucket.layout.shard_numel
    assert weights.held_nbytes == whole + (shard if stage == 3 else 0)
    weights.reshard()
    assert weights.held_nbytes == (shard if stage == 3 else whole)
    weights.start_gather()
    weights.finish_gather()
    assert values_of(bucket) == COUNTING


class Completing(Owner):
    """Answers for the parameters of a bucket: whoever reads one gets it whole."""

    def __init__(self, weights: BucketWeights) -> None:
        self.weights = weights

    def complete(self) -> None:
        self.weights.start_gather()
        self.weights.finish_gather()


def test_a_read_of_what_is_on_its_way_waits_for_it():
    def on_a_rank(world: World) -> float:
        bucket = OneBucket(world, stage=3)
        weights = bucket.weights()
        owner = Completing(weights)
        for parameter in bucket.parameters:
            settle([parameter], owner)
        weights.reshard()
        weights.start_gather()
        return (bucket.parameters[2] + 0).sum().item()

    assert run_threads(on_a_rank, 2, late_rank=0)[0] == [float(sum(range(69, 78)))] * 2


def test_a_read_after_the_engine_has_gone_is_refused():
    bucket = OneBucket(alone(), stage=3)
    weights = bucket.weights()
    weights.reshard()
    with pytest.raises(EngineStateError, match="after its engine was deleted"):
        bucket.parameters[0].sum()
    owner = Completing(weights)
    settle([bucket.parameters[0]], owner)
    del owner, weights
    gc.collect()
    with pytest.raises(EngineStateError, match="after its engine was deleted"):
        bucket.parameters[0].sum()


def test_drained_it_issues_the_gather_that_was_prepared_and_only_that():
    def on_a_rank(world: World) -> None:
        prepared, other = OneBucket(world, stage=2).weights(), OneBucket(world, stage=2).weights()
        prepared.prepare_gather()
        for weights in (prepared, other):
            weights.drain()
            assert weights.is_full
        prepared.drain()

    assert run_threads(on_a_rank, 2)[1].orders == [["gather unit"]] * 2


@pytest.mark.parametrize("on_its_way", [False, True])
def test_let_go_its_parameters_have_their_class_again(on_its_way):
    def on_a_rank(world: World) -> set[type]:
        bucket = OneBucket(world, stage=3, kind=Marked)
        weights = bucket.weights()
        weights.reshard()
        if on_its_way:
            weights.start_gather()
        weights.let_go()
        assert not on_its_way or values_of(bucket) == COUNTING
        return {type(parameter) for parameter in bucket.parameters}

    assert run_threads(on_a_rank, 2)[0] == [{live_class(Marked)}] * 2


def test_a_part_is_that_of_the_ranks_that_share_the_shards_not_of_the_world():
    world = World(rank=3, size=4, local_rank=3, device=CPU, shards=Shards(rank=0, size=1))
    assert OneBucket(world, stage=3).weights().own == slice(0, 3 * 64)
