"""Old buckets of the same model as a source, after a change of what trains or of the stage.

Bucket borders change no bits, so a change of what trains may move every parameter to another place: meanwhile a rank
holds its state twice, old and new. After a change of the stage the borders are the same: a rank has most of what it
needs of a bucket already, and keeps it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.device.device import lies_on_host
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.update import update_range
from zerotrain.engine.state import named
from zerotrain.engine.state.fill import Keeps, KeptOnce, KeptTensor, Source
from zerotrain.errors import EngineStateError
from zerotrain.sharding.layout import Slot, slot_view
from zerotrain.sharding.plan import Plan
from zerotrain.sharding.units import ManagedParameter

Described = dict[tuple[int, int] | str, dict[str, tuple[Any, Any]]]
"""The optimizer's state of a rank, for the others: by (group, generation), or by name of a parameter updated whole."""


class OtherBuckets(Source):
    """Old buckets, whose parameters go to new ones, of other borders or under another plan.

    Args:
        buckets: as they lie now.
        described: the result of `described_state` on this rank.
        plan: of the new buckets.
    """

    is_collective = True
    has_state = True

    def __init__(self, buckets: Sequence[Bucket], described: Described, plan: Plan, collectives: Collectives) -> None:
        self._plan, self._collectives = plan, collectives
        self.has_average = any(named.current_average(bucket) is not None for bucket in buckets)
        self._homes: dict[torch.Tensor, tuple[Bucket, int]] = {}
        """The old bucket of each parameter, and its place there."""
        for bucket in buckets:
            self._homes |= {parameter: (bucket, place) for place, parameter in enumerate(bucket.spec.tensors)}
        # A rank without elements of a parameter learns from the others which state it has.
        everyone: Described = {}
        for of_rank in collectives.gather_objects(described, name="optimizer state"):
            everyone |= of_rank
        self._keeps: dict[tuple[int, int] | str, dict[str, KeptTensor | KeptOnce]] = {}
        for key, state in everyone.items():
            keeps = self._keeps[key] = {}
            for name, fields in state.items():
                keeps[name] = KeptTensor(*fields) if isinstance(fields[1], torch.dtype) else KeptOnce(*fields)
        self._whole: torch.Tensor | None = None
        """The values of the begun role, from all ranks; None where this rank has its part already."""
        self._from_owners: dict[int, torch.Tensor] = {}

    def keeps(self, managed: ManagedParameter) -> Keeps:
        return self._keeps.get(_key(managed), {})

    def begin(self, bucket: Bucket, role: str) -> None:
        self._whole = None
        self._from_owners = {}
        old = self._old(bucket)
        if old.spec is not bucket.spec:
            if (dtype := self._dtype(bucket, role)) is not None:
                self._whole = self._joined(bucket, role, dtype)
            self._from_owners = dict(self._sent_by_owners(bucket, role))
        elif isinstance(old, TrainedBucket) and old.weights.plan.shards_optimizer and not self._plan.shards_optimizer:
            if (dtype := self._dtype(bucket, role)) is not None:
                self._whole = named.capture(old, role, dtype, self._collectives)
            if role == AVERAGE:
                old.update.average = None  # a rank has room for it once
            elif role != WEIGHT:
                for state in named.kept_states(old):
                    if isinstance(state.where, slice):
                        state.values.pop(role, None)  # a rank has room for it once
                self._from_owners = dict(self._sent_by_owners(bucket, role))

    def read(self, piece: named.NamedPiece) -> None:
        assert self._whole is not None
        piece.values.copy_(self._whole[piece.in_bucket])

    def hand_over(self, bucket: Bucket, role: str, where: slice | int) -> torch.Tensor | None:
        if isinstance(where, int) and where in self._from_owners:
            return self._from_owners[where]
        if isinstance(where, slice) and self._whole is not None:
            # Not copied if all of it is kept: a bucket is whole but once.
            return self._whole[where].clone() if self._plan.shards_optimizer else self._whole[where]
        for held, values in named.held_values(self._old(bucket), role):
            if held == where:
                return values
            if isinstance(held, int) or isinstance(where, int):
                continue
            if held.start <= where.start and where.stop <= held.stop:
                return values[where.start - held.start : where.stop - held.start].clone()
        raise AssertionError(f"{role} of {bucket.spec.name} is not where the plans have it")

    def master_of(self, bucket: Bucket) -> torch.Tensor | None:
        """The master weight of an old bucket over this rank's range to update under the new plan; None where it is the
        model's."""
        if not isinstance(bucket, TrainedBucket):
            return None
        bucket.update.current_weight()  # with the writes of others than the engine
        if not bucket.update.has_copy:
            return None
        self.begin(bucket, WEIGHT)
        return self.hand_over(bucket, WEIGHT, update_range(bucket.layout, self._plan, self._collectives.shards.rank))

    def let_go(self, bucket: Bucket) -> None:
        """Others have all of an old bucket: keep nothing of it."""
        self._whole = None
        self._from_owners = {}
        for managed in bucket.spec.parameters:
            del self._homes[managed.parameter]

    def _old(self, bucket: Bucket) -> Bucket:
        return self._homes[bucket.spec.parameters[0].parameter][0]

    def _dtype(self, bucket: Bucket, role: str) -> torch.dtype | None:
        """The dtype of a role with a number for each element of a bucket; None where there is none."""
        if role in (WEIGHT, AVERAGE):
            return torch.float32
        for managed in bucket.spec.parameters:
            tensor = self.keeps(managed).get(role)
            if isinstance(tensor, KeptTensor) and tensor.shape is None:
                return tensor.dtype
        return None

    def _joined(self, bucket: Bucket, role: str, dtype: torch.dtype) -> torch.Tensor:
        """(padded_numel,) of a new bucket, 0 for parameters without any. Collective; an old bucket is whole too."""
        members: dict[Bucket, list[tuple[Slot, Slot]]] = {}
        for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
            old, place = self._homes[managed.parameter]
            if role in (WEIGHT, AVERAGE) or (isinstance(old, TrainedBucket) and role in self.keeps(managed)):
                members.setdefault(old, []).append((slot, old.layout.slots[place]))
        whole = torch.zeros(bucket.layout.padded_numel, dtype=dtype, device=self._collectives.world.device)
        for old, moving in members.items():
            # The average of a parameter that was frozen begins with its weight.
            source_role = WEIGHT if role == AVERAGE and named.current_average(old) is None else role
            values = named.capture(old, source_role, whole.dtype, self._collectives)
            for slot, old_slot in moving:
                slot_view(whole, slot).copy_(slot_view(values, old_slot))
        return whole

    def _sent_by_owners(self, bucket: Bucket, role: str) -> Iterator[tuple[int, torch.Tensor]]:
        """State of parameters updated whole, by their slots in a new bucket, on all ranks. Collective."""
        device, rank = self._collectives.world.device, self._collectives.shards.rank
        for slot, managed in enumerate(bucket.spec.parameters[: bucket.spec.num_whole]):
            old, place = self._homes[managed.parameter]
            tensor = self.keeps(managed).get(role)
            if not isinstance(tensor, KeptTensor) or not isinstance(old, TrainedBucket):
                continue
            if not old.weights.plan.shards_optimizer:
                yield slot, old.update.whole_state(place)[role]
                continue
            owner = old.update.owners[place]
            if owner == rank:
                values = old.update.whole_state(place)[role].to(device).contiguous()
            else:
                values = torch.empty(tensor.shape or (), dtype=tensor.dtype, device=device)
            flat = values.view(-1).view(torch.uint8)
            self._collectives.broadcast(flat, name=f"{role} of {old.spec.name}", source=owner)
            yield slot, values


def described_state(buckets: Sequence[Bucket]) -> Described:
    """The optimizer's state on this rank: of a tensor its shape and dtype, and otherwise the value.

    Raises:
        EngineStateError: it keeps something else.
    """
    described: Described = {}
    for bucket in buckets:
        for state in named.kept_states(bucket):
            tensors = state.tensors()
            for name, value in state.values.items():
                if name not in tensors:
                    fields = _once(state, name, value)
                else:
                    fields = None if isinstance(state.where, slice) else tuple(value.shape), value.dtype
                described.setdefault(_key(state.members[0]), {})[name] = fields
    return described


def _key(managed: ManagedParameter) -> tuple[int, int] | str:
    return managed.names[0] if managed.is_updated_whole else managed.span


def _once(state: named.KeptState, name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, torch.Tensor):
        return value, False
    if value.ndim > 0:
        raise EngineStateError(
            f"the optimizer keeps {name!r} of shape {tuple(value.shape)} for {state.target.numel()} elements: what "
            "trains cannot change with it; freeze before build_engine instead"
        )
    return value.cpu(), not lies_on_host(value)
