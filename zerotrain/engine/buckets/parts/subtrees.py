"""The sums of the leaves that a rank has run in a step: the tree over all leaves, as far as one rank can build it.

[Note: leaves]
A leaf is what one virtual rank computes in a step: the sum of its micro-batches' gradients, one after the other, in the
dtype that goes on the wire. Leaves are added in pairs, the sums in pairs, and so on, over all ranks. A rank that runs a
power of two of them builds a whole subtree, whose root it sends: so the sum has the same bits on any number of ranks.
A rank adds leaves as a binary counter counts: a sum waits until its neighbour of the same size is there.
"""

import torch

from zerotrain.comm.handles import Scratch, Zeros


class Subtrees:
    """The sums that wait for a neighbour, of one bucket, and the buffers for them.

    Args:
        numel, dtype: of a leaf, in the dtype that leaves are added in.
        zeros: makes the buffers.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, zeros: Zeros) -> None:
        self._numel, self._dtype, self._zeros = numel, dtype, zeros
        self._waiting: list[tuple[int, Scratch]] = []
        """(log2 of the leaves in it, their sum), the largest first."""
        self._free: list[Scratch] = []
        self._root: Scratch | None = None
        """Buffer of the sum of this rank's leaves, on the wire until `clear`."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all buffers that are here."""
        waiting = [scratch for _, scratch in self._waiting] + ([] if self._root is None else [self._root])
        return sum(scratch.storage.nbytes for scratch in (*waiting, *self._free))

    def take(self) -> Scratch:
        """A buffer for a leaf."""
        if self._free:
            return self._free.pop()
        return Scratch(self._zeros(self._numel, self._dtype))

    def give_back(self, scratch: Scratch) -> None:
        """Take back a buffer that is no longer needed."""
        self._free.append(scratch)

    def add(self, leaf: Scratch) -> None:
        """One more leaf; the buffer is no longer the caller's."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            _, neighbour = self._waiting.pop()
            neighbour.storage.add_(leaf.storage)
            self._free.append(leaf)
            leaf, level = neighbour, level + 1
        self._waiting.append((level, leaf))

    def add_last(self, leaf: torch.Tensor) -> torch.Tensor:
        """The root of this rank's leaves, of which `leaf` is the last. It stays as it is until `clear`."""
        root = leaf
        while self._waiting:
            if self._root is not None:
                self._free.append(self._root)
            _, self._root = self._waiting.pop()
            root = self._root.storage.add_(root)
        return root

    def clear(self) -> None:
        """Forget all sums; the buffers stay for the next step."""
        if self._waiting:
            self._free += [scratch for _, scratch in self._waiting]
            self._waiting.clear()
        if self._root is not None:
            self._free.append(self._root)
            self._root = None
