"""Buffers on loan, cut as a bucket is."""

import torch

from zerotrain.comm.scratch import Scratch
from zerotrain.sharding.flat_buffer import slot_view
from zerotrain.sharding.layout import BucketLayout


def cut(scratch: Scratch, layout: BucketLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the first padded_numel elements of a buffer on loan, one view for each slot of a layout)"""
    if layout not in scratch.cuts:
        flat = scratch.storage[: layout.padded_numel]
        scratch.cuts[layout] = (flat, [slot_view(flat, slot) for slot in layout.slots])
    views: tuple[torch.Tensor, list[torch.Tensor]] = scratch.cuts[layout]
    return views
