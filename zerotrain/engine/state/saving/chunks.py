"""Bytes of tensors in the host's memory, for a thread that writes beside the one that trains."""

import torch

from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, Entry
from zerotrain.device.device import Event, lies_on_host
from zerotrain.device.kinds import device_of


class ChunkReader:
    """Reads from the host's memory without a copy, and from a GPU's through one buffer, on a stream of its own.

    Made on the thread that trains: what that has told the device until then is done before anything is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream, self._begun = self._device.stream(), self._device.event()
        self._buffer = self._device.host_bytes(CHUNK_NBYTES)
        self._copied: dict[Entry, Event] = {}

    def was_copied(self, entry: Entry) -> None:
        """From now on the bytes of an entry are read from a copy, which was queued just now."""
        if not lies_on_host(entry.values):
            self._copied[entry] = self._device.event()

    def read(self, entry: Entry, source: torch.Tensor) -> memoryview:
        """Bytes of an entry, at most `CHUNK_NBYTES` of them: they stay until the next call."""
        if lies_on_host(source):
            return source.numpy().data
        target = self._buffer[: source.numel()]
        self._stream.copy(target, source, after=[self._copied.get(entry, self._begun)]).settle()
        return target.numpy().data
