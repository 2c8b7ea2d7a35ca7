"""Micro-batches on their way to the device: on a GPU copied beside what it computes."""

from typing import Any, NamedTuple

import torch

from zerotrain.data.reading.inputs import to_device, with_tensors


class Copied(NamedTuple):
    """Micro-batches whose copies were issued."""

    batches: list[Any]
    done: torch.cuda.Event | None
    """None where nothing is to be waited for."""


class DeviceCopies:
    """Copies to one device. `start` may be called in another thread than `finish`.

    On a GPU the copies run on a stream of their own, out of pinned memory. Memory that belongs to that stream may be
    given away by it as soon as nobody refers to it, though the model's stream still reads it: wrong inputs without a
    word. So `finish` lets the stream of the copies wait for all that was done with the step before, and only then lets
    go of it. (torch's `record_stream` would do too, and keep the memory for as long as the host happens to run ahead.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_use: list[Any] = []

    def start(self, batches: list[Any]) -> Copied:
        """Issue the copies of some micro-batches in the host's memory."""
        if self._stream is None:
            return Copied([to_device(batch, self._device) for batch in batches], None)
        with torch.cuda.stream(self._stream):
            # torch keeps pinned memory that a copy was issued from until the copy is over.
            pinned = [with_tensors(batch, torch.Tensor.pin_memory) for batch in batches]
            return Copied(
                [to_device(batch, self._device, non_blocking=True) for batch in pinned], self._stream.record_event()
            )

    def finish(self, copied: Copied) -> list[Any]:
        """The same micro-batches on the device, for the current stream. The ones before may be written over from now
        on."""
        if self._stream is not None and copied.done is not None:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_event(current.record_event())
            current.wait_event(copied.done)
        self._in_use = copied.batches
        return copied.batches
