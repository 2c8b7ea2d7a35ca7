"""Full weights out of the shards: one bucket at a time, on rank 0."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.world import World
from zerotrain.engine.live_unit import Bucket
from zerotrain.sharding.flat_buffer import slot_view


def full_state_dict(model: nn.Module, buckets: Iterable[Bucket], world: World) -> dict[str, torch.Tensor]:
    """Name -> full tensor in the order of `model.state_dict()`: parameters in fp32, the rest as it is."""
    weights: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        flat = bucket.weights.full_master()
        if world.rank != 0:
            continue
        for slot, managed in zip(bucket.weights.layout.slots, bucket.weights.spec.parameters, strict=True):
            weights |= dict.fromkeys(managed.names, _as_fp32(slot_view(flat, slot)))
    if world.rank != 0:
        return {}
    state = model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
    return {
        name: weights[name] if name in weights else value.detach().to("cpu", copy=True)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def weights_sha256(buckets: Iterable[Bucket], world: World, collectives: Collectives) -> str:
    """SHA-256 of the bytes of the full fp32 weights in the order of their (first) names. One bucket is held whole."""
    places = {
        managed.names[0]: (bucket, slot)
        for bucket in buckets
        for slot, managed in zip(bucket.weights.layout.slots, bucket.weights.spec.parameters, strict=True)
    }
    digest = hashlib.sha256()
    held, flat = None, None
    for name in sorted(places):
        bucket, slot = places[name]
        if bucket is not held:
            flat = None  # before the next is gathered, not after
            held, flat = bucket, bucket.weights.full_master()
        if world.rank == 0 and flat is not None:
            digest.update(_as_fp32(flat[slot.offset : slot.end]).numpy().tobytes())
    agreed = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=world.device)
    collectives.broadcast(agreed, name="the hash of the weights")
    return bytes(agreed.tolist()).hex()


def _as_fp32(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    return value.to(device="cpu", dtype=torch.float32, copy=True)
