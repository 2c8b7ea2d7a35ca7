"""What parameters take with them when buckets are cut anew: their values, and the optimizer's state of them.

Bucket borders change no bits, so a change of what trains may move every parameter to another place. It goes bucket by
bucket: while it lasts a rank holds what it holds at rest twice, old and new, and beside it one bucket whole.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.optimizer import ShardedOptimizer, Span
from zerotrain.engine.schedule import Bucket, Schedule
from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec, ManagedParameter
from zerotrain.sharding.flat_buffer import slot_view
from zerotrain.sharding.layout import Slot

SpanKey = tuple[int, int]


class Transfer:
    """Takes values and optimizer state out of old buckets and puts them into new ones. All ranks take part."""

    def __init__(self, schedule: Schedule, optimizer: ShardedOptimizer, collectives: Collectives) -> None:
        self.collectives = collectives
        self._optimizer = optimizer
        self._homes: dict[nn.Parameter, tuple[Bucket, Slot]] = {}
        self._indices = {weights: index for index, (weights, _) in enumerate(schedule.trained)}
        for bucket in schedule.buckets:
            members = bucket.weights.spec.parameters
            for slot, managed in zip(bucket.weights.layout.slots, members, strict=True):
                self._homes[managed.parameter] = (bucket, slot)
        self._state = self._describe_state()

    def _describe_state(self) -> dict[SpanKey, dict[str, Any]]:
        """What the optimizer keeps for parameters of each span key, by name: a dtype for a number per element, the
        value itself for what is kept once. A rank whose shards hold nothing of a key learns of it from the others.
        """
        mine: dict[SpanKey, dict[str, Any]] = {}
        for index, spans in enumerate(self._optimizer.spans):
            for span in spans:
                for name, value in self._optimizer.state_of(index, span).items():
                    mine.setdefault(span.key, {})[name] = _described(name, value, span)
        everyone: dict[SpanKey, dict[str, Any]] = {}
        for of_rank in self.collectives.gather_objects(mine, name="optimizer state"):
            everyone |= of_rank
        return everyone

    def fill(self, spec: BucketSpec) -> None:
        """Give the parameters of a new bucket their whole values."""
        for bucket, members in self._by_home(spec.parameters).items():
            whole = bucket.weights.full_master()
            for managed in members:
                _, slot = self._homes[managed.parameter]
                managed.parameter.data = slot_view(whole, slot).clone()

    def restore_state(self, optimizer: ShardedOptimizer, schedule: Schedule) -> None:
        """Give the new buckets the state of those of their parameters that trained before."""
        for index, (weights, _) in enumerate(schedule.trained):
            trained_before = [m for m in weights.spec.parameters if self._homes[m.parameter][0].gradient is not None]
            by_home = self._by_home(trained_before)
            for span in optimizer.spans[index]:
                for name, value in self._state.get(span.key, {}).items():
                    if not isinstance(value, torch.dtype):
                        optimizer.state_of(index, span)[name] = _placed(value, span.target.device)
            for name, dtype in self._per_element(by_home):
                part = self._whole_state(name, dtype, weights, by_home)[weights.optimizer_range]
                for span in optimizer.spans[index]:
                    if name in self._state.get(span.key, {}):
                        optimizer.state_of(index, span)[name] = part[span.where].clone()

    def _by_home(self, members: Iterable[ManagedParameter]) -> dict[Bucket, list[ManagedParameter]]:
        """Parameters by the old bucket they lie in."""
        by_home: dict[Bucket, list[ManagedParameter]] = {}
        for managed in members:
            by_home.setdefault(self._homes[managed.parameter][0], []).append(managed)
        return by_home

    def _per_element(self, by_home: dict[Bucket, list[ManagedParameter]]) -> list[tuple[str, torch.dtype]]:
        """(name, dtype) of the state kept for each element of any of these parameters."""
        keys = {managed.span for members in by_home.values() for managed in members}
        kept = {name: value for key in keys for name, value in self._state.get(key, {}).items()}
        return sorted((name, value) for name, value in kept.items() if isinstance(value, torch.dtype))

    def _whole_state(
        self, name: str, dtype: torch.dtype, weights: BucketWeights, by_home: dict[Bucket, list[ManagedParameter]]
    ) -> torch.Tensor:
        """(padded_numel,) of a new bucket: one kind of state, 0 for parameters that have none. Collective."""
        slots = {
            managed.parameter: slot for managed, slot in zip(weights.spec.parameters, weights.layout.slots, strict=True)
        }
        whole = torch.zeros(weights.layout.padded_numel, dtype=dtype, device=weights.master_weight.device)
        for bucket, members in by_home.items():
            old, index = bucket.weights, self._indices[bucket.weights]
            own = torch.zeros(old.master_weight.numel(), dtype=dtype, device=whole.device)
            for span in self._optimizer.spans[index]:
                state = self._optimizer.state_of(index, span)
                if name in state:
                    own[span.where] = state[name]
            values = old.gathered(own)
            for managed in members:
                _, slot = self._homes[managed.parameter]
                slot_view(whole, slots[managed.parameter]).copy_(slot_view(values, slot))
        return whole


def _described(name: str, value: Any, span: Span) -> Any:
    """How a piece of state travels to the other ranks.

    Raises:
        EngineStateError: it is neither one number per element nor one for all.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == span.target.shape:
        return value.dtype
    if value.ndim == 0:
        return value.cpu() if value.is_cpu else _OnDevice(value.cpu())
    raise EngineStateError(
        f"the optimizer keeps {name!r} of shape {tuple(value.shape)} for {span.target.numel()} elements: what trains "
        "cannot change with it; freeze before build_engine instead"
    )


@dataclass(frozen=True)
class _OnDevice:
    """A 0-dim tensor that the optimizer keeps beside the weights, on its way through the CPU."""

    value: torch.Tensor


def _placed(value: Any, device: torch.device) -> Any:
    """A copy of a described piece of state for one span."""
    return value.value.to(device, copy=True) if isinstance(value, _OnDevice) else deepcopy(value)
