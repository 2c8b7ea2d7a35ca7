"""A device without memory, on which a plan rehearses: torch's meta device."""

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
