"""The ranks of one host that read each other's memory, as one rank's handles use them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from zerotrain.comm.scratch import Scratch, ScratchPool
from zerotrain.comm.wires.memory.courier import Courier
from zerotrain.comm.wires.memory.local_peers import meet_locally, require_all
from zerotrain.comm.wires.memory.shared_memory import SharedMemory, read_into


class LocalRanks:
    """The ranks of an engine on this host. The thread that moves data ends when nobody uses it any more.

    Args:
        ranks: all, or of several hosts those of this one.
        say: see `Wire.gather_objects`.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        NotLocalError: they are not all on this host, or one of any host cannot; on all ranks alike.
    """

    num_staged = 0
    """Times that what was sent lay in memory that others cannot read, and was copied."""

    def __init__(self, rank: int, ranks: range, say: Callable[[Any], list[Any]], timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, len(ranks), timeout_s
        self.place = ranks.index(rank)
        """This rank's index among them."""
        self.peers = tuple(peer for peer in ranks if peer != rank)
        memory, why = _memory()
        require_all(say, why)
        assert memory is not None
        self.memory = memory
        self.courier = meet_locally(rank, ranks, memory.file, say, timeout_s, Courier)
        self.rows = SharedRows()
        self._staging = ScratchPool(dtype=torch.uint8, device=torch.device("cpu"), zeros=memory.zeros)
        weakref.finalize(self, self.courier.leave)

    def stage(self, sent: torch.Tensor, *, stays: bool) -> tuple[Scratch, int]:
        """(a copy, its offset in the memory that others read) of a flat tensor, until `unstage`.

        Args:
            stays: the memory of the copy is kept for the next one.
        """
        self.num_staged += 1
        scratch = self.borrow(sent.nbytes, stays=stays)
        scratch.storage[: sent.nbytes].copy_(sent.view(torch.uint8))
        offset = self.memory.offset_of(scratch.storage)
        assert offset is not None
        return scratch, offset

    def borrow(self, nbytes: int, *, stays: bool) -> Scratch:
        """Bytes that others can read, until `unstage`."""
        return self._staging.take(nbytes) if stays else Scratch(self.memory.zeros(nbytes, torch.uint8))

    def unstage(self, scratch: Scratch, *, stays: bool) -> None:
        """All have read it."""
        if stays:
            self._staging.give_back(scratch)


class SharedRows:
    """Buffers in which reductions read and add, small enough for the cache; shared, since one thread reads. With new
    ones for each chunk malloc gave them back in between: 7,000 more page faults in a step of 13.9 M parameters."""

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def of(self, use: str, dtype: torch.dtype, num_rows: int, numel: int) -> torch.Tensor:
        """(num_rows, numel), the same memory at each call for one use."""
        nbytes = num_rows * numel * dtype.itemsize
        if use not in self._bytes or self._bytes[use].nbytes < nbytes:
            self._bytes[use] = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[use][:nbytes].view(dtype).view(num_rows, numel)


def _memory() -> tuple[SharedMemory | None, str]:
    """(the memory of this rank, why there is none)"""
    try:
        memory = SharedMemory()
        _try(memory)
    except (OSError, AttributeError, RuntimeError) as error:
        return None, f"it cannot make memory that others can read: {error}"
    return memory, ""


def _try(memory: SharedMemory) -> None:
    """Allocate, map, and read as others do: a sandbox may forbid any of it, which would end the run later.

    Raises:
        RuntimeError: it cannot be done.
    """
    page, read = memory.zeros(1, torch.uint8).fill_(1), torch.zeros(1, dtype=torch.uint8)
    offset = memory.offset_of(page)
    assert offset is not None
    read_into(read.data_ptr(), 1, memory.file, offset)
    if not torch.equal(read, page):
        raise RuntimeError("what is read is not what was written")
