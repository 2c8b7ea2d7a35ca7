"""What parameters take with them when buckets are cut anew: their values, and the optimizer's state of them.

Bucket borders change no bits, so a change of what trains may move every parameter to another place. It goes bucket by
bucket: while it lasts a rank holds what it holds at rest twice, old and new, and beside it one bucket whole.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.device.device import lies_on_host
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.parts.spans import Span
from zerotrain.engine.model.live_parameter import set_data
from zerotrain.engine.state.named import capture, per_element, restore
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.flat_buffer import slot_view
from zerotrain.sharding.layout import Slot
from zerotrain.sharding.units import ManagedParameter

SpanKey = tuple[int, int]
Described = dict[SpanKey, dict[str, Any]]


class StateTransfer:
    """Takes values and optimizer state out of old buckets and puts them into new ones. All ranks take part.

    Args:
        kept: what `described_state` gave of them.
    """

    def __init__(self, buckets: Sequence[Bucket], kept: Described, collectives: Collectives) -> None:
        self._collectives = collectives
        self._homes: dict[nn.Parameter, tuple[Bucket, Slot]] = {
            managed.parameter: (bucket, slot)
            for bucket in buckets
            for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True)
        }
        self._state = shared_state(kept, collectives)

    def fill(self, spec: BucketSpec) -> None:
        """Give the parameters of a new bucket their whole values."""
        for bucket, members in self._by_home(spec.parameters).items():
            whole = capture(bucket, WEIGHT, torch.float32, self._collectives)
            for managed in members:
                _, slot = self._homes[managed.parameter]
                set_data(managed.parameter, slot_view(whole, slot).clone())

    def restore_state(self, trained: Iterable[TrainedBucket]) -> None:
        """Give the new buckets the state of those of their parameters that trained before."""
        for bucket in trained:
            members = [m for m in bucket.spec.parameters if isinstance(self._homes[m.parameter][0], TrainedBucket)]
            for span in bucket.update.spans:
                for name, value in self._state.get(span.key, {}).items():
                    if not isinstance(value, torch.dtype):
                        bucket.update.span_state(span)[name] = placed(value, bucket.update.device)
            for name, dtype in self._per_element(members):
                keys = [key for key, state in self._state.items() if name in state]
                restore(bucket, name, self._whole_state(name, dtype, bucket, members), keys)

    def _by_home(self, members: Iterable[ManagedParameter]) -> dict[Bucket, list[ManagedParameter]]:
        """Parameters by the old bucket they lie in."""
        by_home: dict[Bucket, list[ManagedParameter]] = {}
        for managed in members:
            by_home.setdefault(self._homes[managed.parameter][0], []).append(managed)
        return by_home

    def _per_element(self, members: Sequence[ManagedParameter]) -> list[tuple[str, torch.dtype]]:
        """(name, dtype) of the state kept for each element of any of these parameters."""
        keys = {managed.span for managed in members}
        kept = {name: value for key in keys for name, value in self._state.get(key, {}).items()}
        return sorted((name, value) for name, value in kept.items() if isinstance(value, torch.dtype))

    def _whole_state(
        self, name: str, dtype: torch.dtype, bucket: TrainedBucket, members: Sequence[ManagedParameter]
    ) -> torch.Tensor:
        """(padded_numel,) of a new bucket: one kind of state, 0 for parameters that have none. Collective."""
        slots = {m.parameter: slot for m, slot in zip(bucket.spec.parameters, bucket.layout.slots, strict=True)}
        whole = torch.zeros(bucket.layout.padded_numel, dtype=dtype, device=self._collectives.world.device)
        for old, moving in self._by_home(members).items():
            values = capture(old, name, dtype, self._collectives)
            for managed in moving:
                _, slot = self._homes[managed.parameter]
                slot_view(whole, slots[managed.parameter]).copy_(slot_view(values, slot))
        return whole


def described_state(buckets: Sequence[Bucket]) -> Described:
    """What the optimizer keeps on this rank for parameters of each span key, by name: a dtype for a number per element,
    and for what is kept once the value, and whether it lies on the device.

    Raises:
        EngineStateError: it keeps something else.
    """
    mine: Described = {}
    for bucket in (each for each in buckets if isinstance(each, TrainedBucket)):
        for span in bucket.update.spans:
            for name, value in bucket.update.span_state(span).items():
                mine.setdefault(span.key, {})[name] = _described(name, value, span)
    return mine


def shared_state(mine: Described, collectives: Collectives) -> Described:
    """The same of all ranks together: one whose shards hold nothing of a key learns of it from the others."""
    everyone: Described = {}
    for of_rank in collectives.gather_objects(mine, name="optimizer state"):
        everyone |= of_rank
    return everyone


def _described(name: str, value: Any, span: Span) -> Any:
    """How a piece of state travels to the other ranks.

    Raises:
        EngineStateError: it is neither one number per element nor one for all.
    """
    if not isinstance(value, torch.Tensor):
        return value, False
    if per_element(span.target, {name: value}):
        return value.dtype
    if value.ndim == 0:
        return value.cpu(), not lies_on_host(value)
    raise EngineStateError(
        f"the optimizer keeps {name!r} of shape {tuple(value.shape)} for {span.target.numel()} elements: what trains "
        "cannot change with it; freeze before build_engine instead"
    )


def placed(described: tuple[Any, bool], device: torch.device) -> Any:
    """A copy of a described piece of state for one span."""
    value, on_device = described
    return value.to(device, copy=True) if on_device else deepcopy(value)
