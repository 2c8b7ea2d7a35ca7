"""Owners and fragments of tensors that are updated whole."""

import pytest

from zerotrain.sharding.layout import BucketLayout, assign_owners, cut_fragments, update_cost


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_fragments_of_a_tensor_cover_it_once_in_order(world_size: int) -> None:
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


def test_owners_share_the_cost_of_every_bucket_and_of_all() -> None:
    block = [(192, 64), (64, 64), (256, 64), (64, 256)]
    owners = assign_owners([block] * 6, 3)
    load = [0, 0, 0]
    for bucket in owners:
        for shape, owner in zip(block, bucket, strict=True):
            load[owner] += update_cost(shape)
    assert set(owners[0]) == {0, 1, 2}
    assert max(load) - min(load) <= update_cost((256, 64))


def test_one_rank_owns_all_and_a_bucket_without_whole_tensors_has_no_owners() -> None:
    assert assign_owners([[(4, 4), (5,)], []], 1) == [[0, 0], []]


def test_the_cost_of_a_matrix_is_that_of_its_products_and_the_same_transposed() -> None:
    assert update_cost((2, 5)) == update_cost((5, 2)) == 2 * (2 * 2 * 5) + 2**3
    assert update_cost((7,)) == 7
    assert update_cost((2, 3, 4)) == 24
