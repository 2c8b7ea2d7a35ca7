"""Bytes of tensors in the host's memory, for a thread that writes beside the one that trains."""

import torch

from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, Entry


class ChunkReader:
    """Reads from the CPU without a copy, and from a GPU through one pinned buffer, on a stream of its own.

    Made on the thread that trains: what that has queued until then is done before anything is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied: dict[Entry, torch.cuda.Event] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._begun = torch.cuda.Event()
            self._begun.record()
            self._buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, pin_memory=True)

    def was_copied(self, entry: Entry) -> None:
        """From now on the bytes of an entry are read from a copy, which was queued just now."""
        if entry.values.is_cuda:
            self._copied[entry] = torch.cuda.Event()
            self._copied[entry].record()

    def read(self, entry: Entry, source: torch.Tensor) -> memoryview:
        """Bytes of an entry, at most `CHUNK_NBYTES` of them: they stay until the next call."""
        if not source.is_cuda:
            return source.numpy().data
        target = self._buffer[: source.numel()]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._copied.get(entry, self._begun))
            target.copy_(source, non_blocking=True)
            self._stream.synchronize()
        return target.numpy().data
