import pytest

from zerotrain.sharding.layout import ALIGN_NUMEL, BucketLayout, assign_owners, cut_fragments, update_cost

SHAPES = [(7, 15), (3,), (), (64, 64), (0, 5), (257, 17), (1,)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
def test_every_slot_and_every_shard_starts_aligned_and_shards_tile_the_bucket(world_size):
    layout = BucketLayout.pack(SHAPES, world_size)
    assert all(slot.offset % ALIGN_NUMEL == 0 for slot in layout.slots)
    assert all(left.end <= right.offset for left, right in zip(layout.slots, layout.slots[1:], strict=False))
    assert layout.slots[-1].end <= layout.padded_numel
    ranges = [layout.shard(rank) for rank in range(world_size)]
    assert [each.start for each in ranges] == [rank * layout.shard_numel for rank in range(world_size)]
    assert ranges[-1].stop == layout.padded_numel
    assert layout.shard_numel % ALIGN_NUMEL == 0


def test_padding_is_less_than_one_block_a_parameter_and_a_rank():
    layout = BucketLayout.pack(SHAPES, 8)
    assert layout.numel == 7 * 15 + 3 + 1 + 64 * 64 + 0 + 257 * 17 + 1
    assert layout.padded_numel - layout.numel < ALIGN_NUMEL * (len(SHAPES) + 8)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_spans_cut_every_shard_at_the_border_without_loss(world_size):
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


def test_a_slot_keeps_the_strides_it_is_given_and_is_contiguous_otherwise():
    layout = BucketLayout.pack([(3, 5), (), (0, 4)], 2)
    assert [slot.stride for slot in layout.slots] == [(5, 1), (), (4, 1)]
    assert BucketLayout.pack([(3, 5)], 2, [(1, 3)]).slots[0].stride == (1, 3)


# Owners and fragments of tensors that are updated whole.


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_fragments_of_a_tensor_cover_it_once_in_order(world_size):
    layout = BucketLayout.pack([(7, 15), (65, 64), (3,), (17, 257)], world_size)
    for index, slot in enumerate(layout.slots):
        fragments = list(cut_fragments(layout, index, owner=0))
        assert [each.in_tensor.start for each in fragments] == [0, *(each.in_tensor.stop for each in fragments[:-1])]
        assert fragments[-1].in_tensor.stop == slot.numel
        for each in fragments:
            start = layout.shard(each.rank).start
            assert start + each.in_shard.start == slot.offset + each.in_tensor.start
            assert each.in_shard.stop <= layout.shard_numel
            assert each.numel == each.in_shard.stop - each.in_shard.start > 0
            assert each.travels == (each.rank != 0)


def test_owners_share_the_cost_of_every_bucket_and_of_all():
    block = [(192, 64), (64, 64), (256, 64), (64, 256)]
    owners = assign_owners([block] * 6, 3)
    load = [0, 0, 0]
    for bucket in owners:
        for shape, owner in zip(block, bucket, strict=True):
            load[owner] += update_cost(shape)
    assert set(owners[0]) == {0, 1, 2}
    assert max(load) - min(load) <= update_cost((256, 64))


def test_one_rank_owns_all_and_a_bucket_without_whole_tensors_has_no_owners():
    assert assign_owners([[(4, 4), (5,)], []], 1) == [[0, 0], []]
