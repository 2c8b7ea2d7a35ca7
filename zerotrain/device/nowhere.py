"""A device without memory, on which a plan rehearses: torch's meta device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerotrain.device.cpu import Cpu
from zerotrain.device.device import Stream


class Nowhere(Cpu):
    """It answers as a CPU does, and has room for anything."""

    holds_values = False

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bytes_for(self, nbytes: int, *streams: Stream) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


@contextmanager
def rehearsing(*, on_host: bool) -> Iterator[None]:
    """In here it stands for a device that computes in the host's memory, or for one that does not."""
    before, Nowhere.is_host = Nowhere.is_host, on_host
    try:
        yield
    finally:
        Nowhere.is_host = before
