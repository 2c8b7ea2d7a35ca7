"""Flat buffers that live for a part of a step and are used again by the next bucket and the next step."""

import torch

from zerotrain.sharding.flat_buffer import slot_view
from zerotrain.sharding.layout import BucketLayout


class Scratch:
    """A flat tensor on loan, cut to a layout's size, with the layout's slots as views."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage
        # By layout: making 10,000 views costs more than filling them.
        self.cuts: dict[BucketLayout, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def cut(self, layout: BucketLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(the first padded_numel elements, one view for each slot)"""
        if layout not in self.cuts:
            flat = self.storage[: layout.padded_numel]
            self.cuts[layout] = (flat, [slot_view(flat, slot) for slot in layout.slots])
        return self.cuts[layout]


class ScratchPool:
    """Lends buffers of one dtype and device; keeps as many as were ever lent at once."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.lent_nbytes = 0
        self._free: list[Scratch] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return self.lent_nbytes + sum(scratch.storage.nbytes for scratch in self._free)

    def take(self, numel: int, layout: BucketLayout | None = None) -> Scratch:
        """A buffer of at least `numel` elements, uninitialised: the smallest free one that fits.

        Of several, one that has been cut for `layout` before is taken, so that all views are made within a few steps.
        Where none fits, the largest free one makes way for a larger, so that sizes settle after one step.
        """
        fitting = [scratch for scratch in self._free if scratch.storage.numel() >= numel]
        if fitting:
            scratch = min(fitting, key=lambda each: (each.storage.numel(), layout not in each.cuts))
            self._free.remove(scratch)
        else:
            if self._free:
                self._free.remove(max(self._free, key=lambda each: each.storage.numel()))
            # Zeros: a fake process group, which benchmarks measure with, never writes what is to be received.
            scratch = Scratch(torch.zeros(numel, dtype=self.dtype, device=self.device))
        self.lent_nbytes += scratch.storage.nbytes
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """End a loan. What reads the buffer must have been waited for."""
        self.lent_nbytes -= scratch.storage.nbytes
        self._free.append(scratch)


class ScratchPools:
    """The pools of one device, one for each dtype that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[torch.dtype, ScratchPool] = {}

    def of(self, dtype: torch.dtype) -> ScratchPool:
        """The pool that lends buffers of `dtype`."""
        return self._pools.setdefault(dtype, ScratchPool(dtype=dtype, device=self.device))

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the buffers on loan."""
        return sum(pool.lent_nbytes for pool in self._pools.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return sum(pool.held_nbytes for pool in self._pools.values())
