"""The tensors of one bucket for an update as a whole: each is updated by its owner, one of the ranks.

Shards stay what they are. In a step each rank sends the parts of weights and gradients that lie in its shard to the
tensors' owners, in one exchange; an owner holds its tensors whole while it updates them, and sends the new weights
back, in another. Optimizer state (momentum) stays whole with the owner. With a replicated optimizer every rank has the
whole tensors anyway: each updates all, and nothing is sent.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import Exchange, Scratch, ScratchPool
from zerotrain.engine.model.forward import named_range
from zerotrain.sharding.layout import ALIGN_NUMEL, BucketLayout, Fragment, cut_fragments, round_up

Updates = list[tuple[torch.Tensor, torch.Tensor]]
"""(what an optimizer holds as its parameter, its gradient)"""


class Shipment(NamedTuple):
    """Tensors on their way to other ranks, in buffers on loan."""

    exchange: Exchange
    received: torch.Tensor
    buffers: list[Scratch]


class WholeTensors:
    """Moves the whole tensors of one bucket to their owners and back.

    Args:
        name: of the bucket.
        master_weight: master dtype, over this rank's shard, or all of the bucket where the optimizer is replicated.
        owners: rank by index of the tensor in the bucket; they come first in it.
        pool: lends buffers of the master dtype.
    """

    targets: dict[int, torch.Tensor]
    """By index in the bucket, the tensors this rank updates, in their shapes: views of the master weight where it is
    replicated; else without memory of their own, except while they are updated."""

    def __init__(
        self,
        name: str,
        master_weight: torch.Tensor,
        layout: BucketLayout,
        *,
        is_sharded: bool,
        owners: Sequence[int],
        collectives: Collectives,
        pool: ScratchPool,
    ) -> None:
        self._name = name
        self._master_weight = master_weight
        self._slots = slots = layout.slots
        self._collectives = collectives
        self._pool = pool
        self._is_sharded = is_sharded
        rank = collectives.shards.rank
        fragments = [fragment for slot, owner in enumerate(owners) for fragment in cut_fragments(layout, slot, owner)]
        self._is_exchanged = is_sharded and any(fragment.travels for fragment in fragments)
        self._leaving = [fragment for fragment in fragments if fragment.rank == rank and fragment.travels]
        self._leaving.sort(key=lambda fragment: fragment.owner)
        self._coming = [fragment for fragment in fragments if fragment.owner == rank and fragment.travels]
        self._coming.sort(key=lambda fragment: fragment.rank)
        self._staying = [fragment for fragment in fragments if fragment.rank == rank and not fragment.travels]
        if is_sharded:
            # An expanded scalar: it has the tensor's shape, and no memory.
            self._at_rest = master_weight.new_zeros(())
            owned = [slot for slot, owner in enumerate(owners) if owner == rank]
            self.targets = {slot: self._at_rest.expand(slots[slot].shape) for slot in owned}
        else:
            self.targets = {index: self._of_master(index) for index in range(len(owners))}
        self._places: dict[int, int] = {}
        """Start of each owned tensor in the scratch, where all are whole."""
        self._whole_numel = 0
        for slot in self.targets:
            self._places[slot] = self._whole_numel
            self._whole_numel += round_up(slots[slot].numel, ALIGN_NUMEL)

    def follow_master(self) -> None:
        """The master weight has other memory under it: so have the tensors that are parts of it."""
        if not self._is_sharded:
            for index, target in self.targets.items():
                target.data = self._of_master(index)

    def _of_master(self, index: int) -> torch.Tensor:
        slot = self._slots[index]
        return self._master_weight[slot.offset : slot.end].view(slot.shape)

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends in a step: weights and gradients of what it does not own, new weights of what it does.

        On average over N ranks that is 3 (N-1)/N**2 of the whole tensors' bytes in the master dtype.
        """
        if not self._is_sharded:
            return 0
        numel = 2 * sum(fragment.numel for fragment in self._leaving) + sum(fragment.numel for fragment in self._coming)
        return numel * self._master_weight.itemsize

    def update(self, gradient: torch.Tensor, step: Callable[[Updates], None]) -> Iterator[None]:
        """Update the tensors. `gradient` is read up to the first pause.

        Args:
            gradient: master dtype, over the bucket's optimizer range.
            step: runs the optimizer on the targets, which are whole then, and their gradients.

        Returns:
            The work. It pauses once the gradient is read, and where something is on the wire, for other buckets to go
            on meanwhile; every rank must resume it at the same points.
        """
        name, slots, master = self._name, self._slots, self._master_weight
        if not self._is_sharded:
            step([(t, gradient[slots[i].offset : slots[i].end].view(t.shape)) for i, t in self.targets.items()])
            yield
            return
        whole = self._pool.take(2 * self._whole_numel)
        tensors, gradients = self._views(whole, 0), self._views(whole, self._whole_numel)
        for fragment in self._staying:
            tensors[fragment.slot].view(-1)[fragment.in_tensor].copy_(master[fragment.in_shard])
            gradients[fragment.slot].view(-1)[fragment.in_tensor].copy_(gradient[fragment.in_shard])
        sent = [source[fragment.in_shard] for fragment in self._leaving for source in (master, gradient)]
        shipment = self._ship(sent, self._leaving, self._coming, num_parts=2)
        yield
        if shipment is not None:
            yield
            with named_range("wait for whole tensors", name):
                parts = []
                for fragment in self._coming:
                    parts += [kind[fragment.slot].view(-1)[fragment.in_tensor] for kind in (tensors, gradients)]
                self._unload(shipment, parts)
        with named_range("optimizer of whole tensors", name):
            for slot, target in self.targets.items():
                target.data = tensors[slot]
            step([(target, gradients[slot]) for slot, target in self.targets.items()])
            for target in self.targets.values():
                target.data = self._at_rest.expand(target.shape)
        updated = [tensors[fragment.slot].view(-1)[fragment.in_tensor] for fragment in self._coming]
        back = self._ship(updated, self._coming, self._leaving, num_parts=1)
        for fragment in self._staying:
            master[fragment.in_shard].copy_(tensors[fragment.slot].view(-1)[fragment.in_tensor])
        self._pool.give_back(whole)
        if back is not None:
            yield
            with named_range("wait for updated tensors", name):
                self._unload(back, [master[fragment.in_shard] for fragment in self._leaving])

    def _views(self, whole: Scratch, start: int) -> dict[int, torch.Tensor]:
        flat, slots = whole.storage[start:], self._slots
        return {
            slot: flat[place : place + slots[slot].numel].view(slots[slot].shape)
            for slot, place in self._places.items()
        }

    def _ship(
        self, parts: Sequence[torch.Tensor], leaving: Sequence[Fragment], coming: Sequence[Fragment], *, num_parts: int
    ) -> Shipment | None:
        if not self._is_exchanged:
            return None
        rank, num_ranks = self._collectives.shards.rank, self._collectives.shards.size
        numels = [[0] * num_ranks, [0] * num_ranks]
        for side, fragments in zip(numels, (leaving, coming), strict=True):
            for fragment in fragments:
                side[fragment.owner if fragment.rank == rank else fragment.rank] += num_parts * fragment.numel
        buffers = [self._pool.take(sum(side)) for side in numels]
        sent, received = (buffer.storage[: sum(side)] for buffer, side in zip(buffers, numels, strict=True))
        _copy_all(sent.split([part.numel() for part in parts]), parts)
        exchange = self._collectives.exchange(f"whole tensors of {self._name}", sent, received, *numels)
        return Shipment(exchange, received, buffers)

    def _unload(self, shipment: Shipment, parts: Sequence[torch.Tensor]) -> None:
        """Wait, and leave what was received in `parts`, in the order of the sending ranks."""
        shipment.exchange.finish()
        _copy_all(parts, shipment.received.split([part.numel() for part in parts]))
        for buffer in shipment.buffers:
            self._pool.give_back(buffer)


def _copy_all(targets: Iterable[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
