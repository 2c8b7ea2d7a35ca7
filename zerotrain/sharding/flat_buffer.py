"""One flat tensor that holds the parameters of a bucket end to end, and whose memory can be given back."""

import torch

from zerotrain.sharding.layout import BucketLayout, Slot


def slot_view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The part of a bucket's flat tensor that belongs to `slot`, with its parameter's shape and strides."""
    return flat[slot.offset : slot.end].as_strided(slot.shape, slot.stride)


class FlatBuffer:
    """A tensor of (layout.padded_numel,).

    Parameters of the model are views of it: what a collective writes is what the model reads, without a copy.
    `release` frees the memory and keeps the tensor, its views and all that autograd saved of them; `allocate`
    brings memory back under the same views.
    """

    def __init__(self, layout: BucketLayout, tensor: torch.Tensor) -> None:
        self.layout = layout
        self.tensor = tensor

    @classmethod
    def zeros(cls, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> "FlatBuffer":
        """Zeroed memory of its own."""
        return cls(layout, torch.zeros(layout.padded_numel, dtype=dtype, device=device))

    def views(self) -> list[torch.Tensor]:
        """The slots in order, each with its parameter's shape and strides."""
        return [slot_view(self.tensor, slot) for slot in self.layout.slots]

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory held now: all or none."""
        return self.tensor.untyped_storage().nbytes()

    def copy(self) -> "FlatBuffer":
        """The same values in memory of their own."""
        return FlatBuffer(self.layout, self.tensor.clone())

    def allocate(self) -> None:
        """Hold memory (uninitialised) if there is none."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.tensor.nbytes)

    def release(self) -> None:
        """Give the memory back."""
        self.tensor.untyped_storage().resize_(0)
