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
    """That of all buckets of an engine.

    Args:
        device: of gradients and weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.stream()
        self._gradients, self._weights = (
            cycle([_Pinned(self._device) for _ in range(NUM_BUFFERS)]) for _ in ("there", "back")
        )

    def bring(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a gradient to the host, beside what the device computes.

        Args:
            gradient: (numel,) of any dtype. It is not written to, nor its memory lent, before the result was called.

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
        self._device, self._memory = device, device.host_bytes(1)
        self.last: Event = DONE
        """Done when its last use is over."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """(numel,) of the tensor's dtype, of any values, once the last use is over."""
        self.last.settle()
        if self._memory.nbytes < tensor.nbytes:
            self._memory = self._device.host_bytes(tensor.nbytes)
        return self._memory[: tensor.nbytes].view(tensor.dtype)
