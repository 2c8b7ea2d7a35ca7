"""Numbers that a device computes and the host reads."""

from collections.abc import Callable
from typing import Any

import torch

from zerotrain.device.kinds import device_of


def reading(values: torch.Tensor) -> Callable[[], Any]:
    """Begin to bring small values to the host; the result waits until they are there and gives them as `tolist` does.

    It waits for what the device was told before, and for nothing that it was told since: `tolist` itself would wait for
    that too, and leave the device without work.
    """
    device = device_of(values.device)
    if device.is_host:
        return values.tolist
    on_host = device.host_bytes(values.nbytes).view(values.dtype).view(values.shape)
    on_host.copy_(values, non_blocking=True)
    arrived = device.event()

    def read() -> Any:
        arrived.settle()
        return on_host.tolist()

    return read
