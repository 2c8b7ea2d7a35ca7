"""Full weights out of the shards: one bucket at a time, on rank 0."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.world import World
from zerotrain.engine.live_unit import Bucket
from zerotrain.sharding.bucketing import ManagedParameter
from zerotrain.sharding.flat_buffer import slot_view


def full_state_dict(model: nn.Module, buckets: Iterable[Bucket], world: World) -> dict[str, torch.Tensor]:
    """Name -> full tensor in the order of `model.state_dict()`: parameters in fp32, the rest as it is."""
    weights = {name: tensor for managed, tensor in _full_weights(buckets, world) for name in managed.names}
    if world.rank != 0:
        return {}
    rest = _unmanaged_state(model, set(weights))
    return {name: weights.get(name, rest.get(name)) for name in _state_names(model)}  # type: ignore[misc]


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


def _full_weights(buckets: Iterable[Bucket], world: World) -> Iterator[tuple[ManagedParameter, torch.Tensor]]:
    """Each parameter in fp32 on the CPU; all ranks take part, rank 0 alone receives."""
    for bucket in buckets:
        flat = bucket.weights.full_master()
        if world.rank != 0:
            continue
        for slot, managed in zip(bucket.weights.layout.slots, bucket.weights.spec.parameters, strict=True):
            yield managed, _as_fp32(slot_view(flat, slot))


def _as_fp32(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    return value.to(device="cpu", dtype=torch.float32, copy=True)


def _state_names(model: nn.Module) -> Iterator[str]:
    """The keys of `model.state_dict()`, without touching a parameter."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from (dot + name for name, value in module._parameters.items() if value is not None)
        yield from (
            dot + name
            for name, value in module._buffers.items()
            if value is not None and name not in module._non_persistent_buffers_set
        )


def _unmanaged_state(model: nn.Module, managed: set[str]) -> dict[str, torch.Tensor]:
    """Copies of persistent buffers and of parameters that are no floating-point numbers."""
    named = dict(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, value in module._parameters.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if value is not None and name not in managed:
                named[name] = value
    return {name: value.detach().to("cpu", copy=True) for name, value in named.items()}
