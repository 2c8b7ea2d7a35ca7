import torch

from zerotrain.engine.scratch import ScratchPool
from zerotrain.sharding.layout import BucketLayout


def pool() -> ScratchPool:
    return ScratchPool(dtype=torch.float32, device=torch.device("cpu"))


def test_a_buffer_given_back_is_lent_again_with_its_views() -> None:
    buffers, layout = pool(), BucketLayout.pack([(3, 5), (7,)], 1)
    first = buffers.take(layout.padded_numel)
    flat, views = first.cut(layout)
    buffers.give_back(first)
    again = buffers.take(layout.padded_numel)
    assert again.cut(layout)[0] is flat
    assert again.cut(layout)[1] is views
    assert [tuple(view.shape) for view in views] == [(3, 5), (7,)]


def test_steps_that_repeat_hold_as_many_buffers_as_were_lent_at_once() -> None:
    buffers = pool()
    for _ in range(3):
        for numel in (100, 300, 200):
            pair = [buffers.take(numel), buffers.take(numel)]
            for scratch in pair:
                buffers.give_back(scratch)
    assert buffers.held_nbytes == 2 * 300 * 4
    assert buffers.lent_nbytes == 0


def test_the_smallest_buffer_that_fits_is_lent() -> None:
    buffers = pool()
    large, small = buffers.take(300), buffers.take(100)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(50) is small
