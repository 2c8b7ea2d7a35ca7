import pytest

from zerotrain.sharding.layout import ALIGN_NUMEL, BucketLayout

SHAPES = [(7, 15), (3,), (), (64, 64), (0, 5), (257, 17), (1,)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
def test_every_slot_and_every_shard_starts_aligned_and_shards_tile_the_bucket(world_size: int) -> None:
    layout = BucketLayout.pack(SHAPES, world_size)
    assert all(slot.offset % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert all(left.end <= right.offset for left, right in zip(layout.slots, layout.slots[1:], strict=False))
    assert layout.slots[-1].end <= layout.padded_numel
    ranges = [layout.shard(rank) for rank in range(world_size)]
    assert [each.start for each in ranges] == [rank * layout.shard_numel for rank in range(world_size)]
    assert ranges[-1].stop == layout.padded_numel
    assert layout.shard_numel % ALIGN_NUMEL == 0


def test_padding_is_less_than_one_block_a_parameter_and_a_rank() -> None:
    layout = BucketLayout.pack(SHAPES, 8)
    assert layout.numel == 7 * 15 + 3 + 1 + 64 * 64 + 0 + 257 * 17 + 1
    assert layout.padded_numel - layout.numel < ALIGN_NUMEL * (len(SHAPES) + 8)


def test_a_bucket_of_aligned_parameters_is_dense_and_one_with_odd_ones_is_not() -> None:
    assert BucketLayout.pack([(64,), (128, 2), (5,)], 2).is_dense
    assert not BucketLayout.pack([(5,), (64,)], 2).is_dense


def test_an_empty_parameter_gets_a_place_without_elements() -> None:
    layout = BucketLayout.pack([(0,)], 2)
    assert layout.numel == 0
    assert layout.padded_numel == 2 * ALIGN_NUMEL


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_spans_cut_every_shard_at_the_border_without_loss(world_size: int) -> None:
    layout = BucketLayout.pack([(100,), (200,), (7,)], world_size)
    border = layout.slots[2].offset
    for rank in range(world_size):
        shard = layout.shard(rank)
        first, second = layout.spans([0, 2], shard)
        covered = {shard.start + index for span in (first, second) for index in range(span.start, span.stop)}
        assert covered == set(range(shard.start, shard.stop))
        assert all(shard.start + index < border for index in range(first.start, first.stop))
        assert all(shard.start + index >= border for index in range(second.start, second.stop))
        assert all(span.start % ALIGN_NUMEL == span.stop % ALIGN_NUMEL == 0 for span in (first, second))


def test_a_slot_keeps_the_strides_it_is_given_and_is_contiguous_otherwise() -> None:
    layout = BucketLayout.pack([(3, 5), (), (0, 4)], 2)
    assert [slot.stride for slot in layout.slots] == [(5, 1), (), (4, 1)]
    assert BucketLayout.pack([(3, 5)], 2, [(1, 3)]).slots[0].stride == (1, 3)
