"""The way of gradients from a GPU to an optimizer on the host, and of weights back, through pinned memory.

Two buckets deep: while the host updates one, the gradient of the next arrives and the weights of the last leave.
"""

from collections.abc import Callable
from itertools import cycle

import torch

from zerotrain.device.device import DONE, Device, Event
from zerotrain.device.kinds import device_of

NUM_BUFFERS = 2


class Crossing:
    """One engine's way, which all its buckets share.

    Args:
        device: of gradients and weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.stream()
        self._buffers = [_Pinned(self._device) for _ in range(2 * NUM_BUFFERS)]
        self._gradients, self._weights = cycle(self._buffers[:NUM_BUFFERS]), cycle(self._buffers[NUM_BUFFERS:])

    @property
    def placed_nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def bring(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a gradient to the host, beside what the device computes.

        Args:
            gradient: (numel,) of any dtype. The caller leaves it as it is until it has called the result.

        Returns:
            Waits for the copy and gives it. It holds until the second `bring` after this one.
        """
        buffer = next(self._gradients)
        copy = buffer.like(gradient)
        buffer.last = self._stream.copy(copy, gradient, after=(self._device.event(),))

        def on_host() -> torch.Tensor:
            buffer.last.settle()
            return copy

        return on_host

    def send(self, master: torch.Tensor, weight: torch.Tensor) -> None:
        """Let the device bring `weight` up to date with what `master`, on the host, is now. The host rounds it: 16 bits
        cross as 16 bits."""
        buffer = next(self._weights)
        rounded = buffer.like(weight).copy_(master)
        weight.copy_(rounded, non_blocking=True)
        buffer.last = self._device.event()


class _Pinned:
    """A buffer of pinned memory, as large as it was ever needed."""

    def __init__(self, device: Device) -> None:
        self._device, self.memory = device, device.host_bytes(1)
        self.last: Event = DONE
        """Done when its last use is over."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """(numel,) of the tensor's dtype, of any values, once the last use is over."""
        self.last.settle()
        if self.memory.nbytes < tensor.nbytes:
            self.memory = self._device.host_bytes(tensor.nbytes)
        return self.memory[: tensor.nbytes].view(tensor.dtype)
