"""Full weights out of the shards: one bucket at a time, on rank 0."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import full_weights


def full_state_dict(model: nn.Module, buckets: Iterable[Bucket], collectives: Collectives) -> dict[str, torch.Tensor]:
    """Name -> full tensor in the order of `model.state_dict()`: parameters in fp32, the rest as it is. Collective."""
    weights: dict[str, torch.Tensor] = {}
    is_asked = collectives.world.rank == 0
    for bucket in buckets:
        for managed, value in full_weights(bucket, collectives):
            if is_asked:
                weights |= dict.fromkeys(managed.names, _as_fp32(value))
    if not is_asked:
        return {}
    state = model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
    return {
        name: weights[name] if name in weights else value.detach().to("cpu", copy=True)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def weights_sha256(buckets: Iterable[Bucket], collectives: Collectives) -> str:
    """SHA-256 of the bytes of the full fp32 weights in the order of their (first) names. One bucket is held whole."""
    homes = {managed.names[0]: bucket for bucket in buckets for managed in bucket.spec.parameters}
    digest = hashlib.sha256()
    held: Bucket | None = None
    by_name: dict[str, torch.Tensor] = {}
    for name in sorted(homes):
        if homes[name] is not held:
            by_name.clear()  # before the next is gathered, not after
            held = homes[name]
            by_name = {managed.names[0]: value for managed, value in full_weights(held, collectives)}
        if collectives.world.rank == 0:
            digest.update(_in_memory_order(by_name[name]).numpy().tobytes())
    agreed = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=collectives.world.device)
    collectives.broadcast(agreed, name="the hash of the weights")
    return bytes(agreed.tolist()).hex()


def _as_fp32(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    return value.to(device="cpu", dtype=torch.float32, copy=True)


def _in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """(numel,) fp32 on the CPU: the elements of a dense tensor as they lie in memory, whatever its strides."""
    return _as_fp32(value.as_strided((value.numel(),), (1,)))
