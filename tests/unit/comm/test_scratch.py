import torch

from zerotrain.comm.handles import ScratchPool


def pool() -> ScratchPool:
    return ScratchPool(dtype=torch.float32, device=torch.device("cpu"))


def test_of_equal_buffers_the_one_that_was_cut_before_is_lent_again() -> None:
    buffers = pool()
    first, second = buffers.take(100), buffers.take(100)
    second.cuts["layout"] = "views"
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take(100, "layout") is second


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
