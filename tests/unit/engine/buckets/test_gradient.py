"""The gradient of one bucket. What is expected is counted in whole numbers."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import OneBucket, alone
from zerotrain.comm.world import World
from zerotrain.engine.buckets.gradient import LARGE_NUMEL, BucketGradient, cut_segments
from zerotrain.engine.buckets.life import Backward
from zerotrain.engine.buckets.norm import digit_sums, norm_of_digit_sums


def give(bucket: OneBucket, *values: float | None) -> None:
    """Let a gradient arrive at each parameter, None at those that get none."""
    for parameter, value in zip(bucket.parameters, values, strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def fill(bucket: OneBucket, gradient: BucketGradient, *values: float | None, more_to_come: bool = False) -> None:
    give(bucket, *values)
    gradient.begin_filling(Backward(reduces=not more_to_come))
    for segment in gradient.segments:
        gradient.fill(segment, segment.gradients())


def reduce(gradient: BucketGradient) -> None:
    gradient.reduce()
    gradient.finish_reduce()


SIZES = (3, LARGE_NUMEL, 5, LARGE_NUMEL - 1)


@pytest.mark.parametrize("which", list(product((False, True), repeat=len(SIZES))), ids=str)
def test_small_and_large_gradients_are_moved_and_what_has_none_is_zero(which):
    """Then a second backward adds to them."""
    tensors = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    spec, slots = SimpleNamespace(tensors=tensors, dtype=torch.float32), [SimpleNamespace(numel=n) for n in SIZES]
    segments = cut_segments(spec, SimpleNamespace(slots=slots))
    assert [segment.ends_large for segment in segments] == [True, False]
    views = [torch.full((size,), torch.nan) for size in SIZES]
    for times in (1, 2):
        for number, (tensor, has_one) in enumerate(zip(tensors, which, strict=True), 1):
            tensor.grad = torch.full_like(tensor, number) if has_one else None
        for segment in segments:
            segment.move(segment.gradients(), views)
        for number, (view, has_one) in enumerate(zip(views, which, strict=True), 1):
            assert torch.equal(view, torch.full_like(view, times * number if has_one else 0))


def poison(bucket: OneBucket) -> None:
    """What the pool lends first holds NaN."""
    scratch = bucket.pool.take(bucket.layout.padded_numel)
    scratch.storage.fill_(float("nan"))
    bucket.pool.give_back(scratch)


SHAPES = {"odd": ((5,), (64,), (3, 3)), "dense": ((64,), (128,), (10,))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_mean_over_ranks_is_cut_into_shards_and_zero_between_and_behind_the_parameters(shapes, stage):
    def on_a_rank(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bucket = OneBucket(world, shapes, stage)
        gradient = bucket.gradient()
        poison(bucket)
        fill(bucket, gradient, *(10.0 ** (i + 1) + world.rank for i in range(3)))
        assert [parameter.grad for parameter in bucket.parameters] == [None] * 3
        reduce(gradient)
        return gradient.shard.clone(), gradient.reduction.reduced().clone(), bucket.flat([11, 101, 1001])

    results, _ = run_threads(on_a_rank, 3)
    for shard, reduced, expected in results:
        assert torch.equal(reduced, expected if stage == 0 else shard)
    assert torch.equal(torch.cat([shard for shard, _, _ in results]), results[0][2])


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_without_a_gradient_counts_as_zeros_whatever_its_place_held(shapes, stage):
    bucket = OneBucket(alone(), shapes, stage)
    gradient = bucket.gradient()
    poison(bucket)
    for _ in range(2):
        fill(bucket, gradient, 7, 7, 7)  # what a buffer that is used again still holds
        reduce(gradient)
        gradient.drop()
        fill(bucket, gradient, 1, None, 2)
        reduce(gradient)
        assert torch.equal(gradient.reduction.reduced(), bucket.flat([1, None, 2]))
        gradient.drop()


@pytest.mark.parametrize("stage", [0, 2])
def test_in_bf16_micro_batches_are_added_in_fp32_and_rounded_once(stage):
    """256 + 1 is 256 in bf16: added there, the ones are lost."""
    bucket = OneBucket(alone(), stage=stage, precision="bf16")
    gradient = bucket.gradient()
    for _ in range(2):
        for value in (256, 1, None):
            fill(bucket, gradient, value, value, 3, more_to_come=True)
        fill(bucket, gradient, 1, None, 3)
        reduce(gradient)
        assert torch.equal(gradient.reduction.reduced().float(), bucket.flat([258, 257, 12]).bfloat16().float())
        gradient.drop()
        assert bucket.pool.lent_nbytes == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_second_reduced_backward_adds_to_the_first(precision, stage):
    def on_a_rank(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = OneBucket(world, stage=stage, precision=precision)
        gradient = bucket.gradient()
        for value in (1.0, 2.0, 4.0):
            fill(bucket, gradient, value, value + 2 * world.rank, None)
            reduce(gradient)
        gradient.reduction.reduced()
        return gradient.shard.float(), bucket.flat([7, 10, None])

    results, _ = run_threads(on_a_rank, 2)
    assert torch.equal(torch.cat([shard for shard, _ in results]), results[0][1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("number_reduced", [0, 1])
@pytest.mark.parametrize("more_to_come", [False, True])
def test_dropped_while_it_is_filled_it_forgets_also_the_earlier_sum_and_gives_back_every_loan(
    more_to_come, number_reduced, stage
):
    bucket = OneBucket(alone(), stage=stage, precision="bf16")
    gradient = bucket.gradient()
    for _ in range(number_reduced):
        fill(bucket, gradient, 1, 1, 1)
        reduce(gradient)
    fill(bucket, gradient, 100, 100, 100, more_to_come=more_to_come)
    assert (bucket.pool.lent_nbytes > 0) == (stage >= 2 and not more_to_come)
    gradient.drop()
    assert bucket.pool.lent_nbytes == 0
    assert gradient.is_empty
    fill(bucket, gradient, 3, 4, 5)
    reduce(gradient)
    assert torch.equal(gradient.reduction.reduced().float(), bucket.flat([3, 4, 5]))


def test_dropped_at_stage_0_it_waits_for_the_gather_that_is_under_way():
    def on_a_rank(world: World) -> bool:
        bucket = OneBucket(world, stage=0)
        gradient = bucket.gradient()
        fill(bucket, gradient, 1, 1, 1)
        reduce(gradient)
        assert gradient.reduction.ends_with_gather
        gradient.drop()
        fill(bucket, gradient, 2, 2, 2)  # into the memory that the gather writes
        reduce(gradient)
        return torch.equal(gradient.reduction.reduced(), bucket.flat([2, 2, 2]))

    assert run_threads(on_a_rank, 3)[0] == [True] * 3


def test_a_loss_scale_is_left_in_the_sum_and_taken_out_of_the_norm():
    bucket = OneBucket(alone(), shapes=((4,),))
    gradient = bucket.gradient()
    fill(bucket, gradient, 3 * 1024.0)
    reduce(gradient)
    assert norm_of_digit_sums(digit_sums(gradient.reduction.take_squares(loss_scale=1024.0))).item() == 6.0
    assert torch.equal(gradient.reduction.reduced(), bucket.flat([3072]))
