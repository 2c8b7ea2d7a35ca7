"""Flat buffers that live for a part of a step and are used again by the next collective and the next step."""

from collections.abc import Callable
from typing import Any

import torch


class Scratch:
    """A flat tensor on loan."""

    storage: torch.Tensor
    """(numel,) as many elements as were asked for, or more."""
    cuts: dict[Any, Any]
    """Views cut by borrowers, by their key: making 10,000 views costs more than filling them."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage
        self.cuts = {}


Zeros = Callable[[int, torch.dtype], torch.Tensor]
"""(numel, dtype) -> (numel,) zeros."""


def zeros_on(device: torch.device) -> Zeros:
    """Zeros in memory of torch's own."""
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)


class ScratchPool:
    """Lends buffers of one dtype and device; keeps as many as were ever lent at once.

    Args:
        zeros: makes them; None: torch does.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, zeros: Zeros | None = None) -> None:
        self.dtype = dtype
        self.device = device
        self._zeros = zeros or zeros_on(device)
        self.lent_nbytes = 0
        self._free: list[Scratch] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return self.lent_nbytes + sum(scratch.storage.nbytes for scratch in self._free)

    def take(self, numel: int, cut_for: Any = None) -> Scratch:
        """A buffer of at least `numel` elements, uninitialised: the smallest free one that fits.

        Among equals it takes one that was cut for `cut_for` before, so that all views are made within a few steps. If
        none fits, a new one replaces the largest free one, so that sizes settle after one step.
        """
        fitting = [scratch for scratch in self._free if scratch.storage.numel() >= numel]
        if fitting:
            scratch = min(fitting, key=lambda each: (each.storage.numel(), cut_for not in each.cuts))
            self._free.remove(scratch)
        else:
            if self._free:
                self._free.remove(max(self._free, key=lambda each: each.storage.numel()))
            # Zeros, not garbage: torch's fake process group, which benchmarks measure with, writes nothing into what is
            # to be received, and a step on garbage met inf.
            scratch = Scratch(self._zeros(numel, self.dtype))
        self.lent_nbytes += scratch.storage.nbytes
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """End a loan. Readers of the buffer must have been waited for."""
        self.lent_nbytes -= scratch.storage.nbytes
        self._free.append(scratch)


class ScratchPools:
    """The pools of one device, one for each dtype that was asked for. See `ScratchPool`."""

    def __init__(self, device: torch.device, zeros: Zeros | None = None) -> None:
        self.device, self._zeros = device, zeros
        self._pools: dict[torch.dtype, ScratchPool] = {}

    def of(self, dtype: torch.dtype) -> ScratchPool:
        """The pool that lends buffers of `dtype`."""
        return self._pools.setdefault(dtype, ScratchPool(dtype=dtype, device=self.device, zeros=self._zeros))

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the buffers on loan."""
        return sum(pool.lent_nbytes for pool in self._pools.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return sum(pool.held_nbytes for pool in self._pools.values())

    def clear(self) -> None:
        """Give back the memory of all buffers; none may be on loan."""
        self._pools.clear()
