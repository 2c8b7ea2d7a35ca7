"""Micro-batches on their way to the device: on a GPU copied beside what it computes."""

from typing import Any, NamedTuple

import torch

from zerotrain.data.reading.inputs import to_device, with_tensors
from zerotrain.device.device import DONE, Event
from zerotrain.device.kinds import device_of


class Copied(NamedTuple):
    """Micro-batches whose copies were issued."""

    batches: list[Any]
    done: Event


class DeviceCopies:
    """Copies to one device. `start` may be called in another thread than `finish`.

    On a GPU the copies run on a stream of their own, out of pinned memory. Memory that belongs to that stream may be
    given away by it as soon as nobody refers to it, though the model's stream still reads it: wrong inputs without a
    word. So `finish` lets the stream of the copies wait for all that was done with the step before, and only then lets
    go of it. (torch's `record_stream` would do too, and keep the memory for as long as the host happens to run ahead.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.stream()
        self._in_use: list[Any] = []

    def start(self, batches: list[Any]) -> Copied:
        """Issue the copies of some micro-batches in the host's memory."""
        device = self._device.device
        if self._device.is_host:
            return Copied([to_device(batch, device) for batch in batches], DONE)
        with self._stream.current():
            # torch keeps pinned memory that a copy was issued from until the copy is over.
            pinned = [with_tensors(batch, torch.Tensor.pin_memory) for batch in batches]
            return Copied([to_device(batch, device, non_blocking=True) for batch in pinned], self._device.event())

    def finish(self, copied: Copied) -> list[Any]:
        """The same micro-batches on the device, for the current stream. The ones before may be written over from now
        on."""
        if copied.done is not DONE:
            self._stream.wait(self._device.event())
            copied.done.wait()
        self._in_use = copied.batches
        return copied.batches
