"""Full weights out of the shards: one bucket at a time, on rank 0."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import full_weights
from zerotrain.sharding.units import ManagedParameter


def full_state_dict(model: nn.Module, buckets: Iterable[Bucket], collectives: Collectives) -> dict[str, Any]:
    """The model's `state_dict()` with full parameters in fp32, on the CPU. Collective. Hooks that rename, add or drop
    keys, and modules that add extra state, see a whole model.
    """
    whole: dict[ManagedParameter, nn.Parameter] = {}
    is_asked = collectives.world.rank == 0
    for bucket in buckets:
        for managed, value in full_weights(bucket, collectives):
            if is_asked:
                copy = value.to(device="cpu", dtype=torch.float32, copy=True)
                whole[managed] = nn.Parameter(copy, requires_grad=managed.parameter.requires_grad)
        bucket.forget()
    if not is_asked:
        return {}
    with _in_place(whole):
        state: dict[str, Any] = model.state_dict()
    copied = {parameter.untyped_storage()._cdata for parameter in whole.values()}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in copied:
            state[name] = value.detach().to("cpu", copy=True)
    return state


@contextmanager
def _in_place(whole: Mapping[ManagedParameter, nn.Parameter]) -> Iterator[None]:
    """In here modules hold these in place of their parameters, where they still have those."""
    places = [
        (owner._parameters, name, managed.parameter, parameter)
        for managed, parameter in whole.items()
        for owner, name in managed.owners
        if owner._parameters.get(name) is managed.parameter
    ]
    try:
        for held, name, _, parameter in places:
            held[name] = parameter
        yield
    finally:
        for held, name, parameter, _ in places:
            held[name] = parameter


def weights_sha256(buckets: Iterable[Bucket], collectives: Collectives) -> str:
    """SHA-256 of the bytes of the full fp32 weights in the order of their (first) names. One bucket is held whole."""
    homes = {managed.names[0]: bucket for bucket in buckets for managed in bucket.spec.parameters}
    digest = hashlib.sha256()
    held: Bucket | None = None
    by_name: dict[str, torch.Tensor] = {}
    for name in sorted(homes):
        if homes[name] is not held:
            by_name.clear()  # before the next is gathered, not after
            if held is not None:
                held.forget()
            held = homes[name]
            by_name = {managed.names[0]: value for managed, value in full_weights(held, collectives)}
        if collectives.world.rank == 0:
            digest.update(_in_memory_order(by_name[name]).numpy().data)
    by_name.clear()
    if held is not None:
        held.forget()
    agreed = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=collectives.world.device)
    collectives.broadcast(agreed, name="the hash of the weights")
    return bytes(agreed.tolist()).hex()


def _in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """(numel,) fp32 on the CPU, not a copy where it is that: the elements of a dense tensor as they lie in memory."""
    return value.as_strided((value.numel(),), (1,)).to(device="cpu", dtype=torch.float32)
