"""The model's state by name, one bucket at a time: weights, gradients, and what the optimizer keeps.

Full weights, their hash, a change of what trains and the search for a bad gradient walk over it; what is saved and what
moves to another stage can be told in the same words: the name of a parameter, a role, and which elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.sharding.layout import slot_view
from zerotrain.sharding.units import ManagedParameter

GRADIENT = "gradient of the step"
"""The role that every bucket has that trains, beside WEIGHT, which every one has, AVERAGE and those that the optimizer
names, none of which is called so."""


@dataclass(frozen=True, eq=False)
class NamedPiece:
    """The part that this rank holds of one parameter in one role."""

    managed: ManagedParameter
    role: str
    values: torch.Tensor
    """The memory itself: (n,) elements; what is kept of a tensor that is updated whole, in the shape it is kept in."""
    in_tensor: slice | None
    """Which elements of the parameter these are, in the order of its memory (`ManagedParameter.stride`); None for what
    is kept of the tensor as a whole."""
    in_bucket: slice | None
    """The place of the same elements in the bucket."""


def pieces(bucket: Bucket, role: str) -> Iterator[NamedPiece]:
    """Give what this rank holds of the parameters of a bucket in one role, in place, without what is empty."""
    if role == WEIGHT:
        yield from cut_pieces(bucket, role, current_weight(bucket), kept_range(bucket))
    elif not isinstance(bucket, TrainedBucket):
        return
    elif role == GRADIENT:
        yield from cut_pieces(bucket, role, bucket.gradient.shard, bucket.weights.own)
    elif role == AVERAGE:
        if (average := current_average(bucket)) is not None:
            yield from cut_pieces(bucket, role, average, bucket.update.where)
    else:
        for kept in kept_states(bucket):
            if role in kept.tensors():
                values = kept.values[role]
                if isinstance(kept.where, slice):
                    yield from cut_pieces(bucket, role, values, kept.where)
                else:
                    yield NamedPiece(kept.members[0], role, values, None, None)


@dataclass(frozen=True, eq=False)
class KeptState:
    """State that the optimizer keeps on this rank of a span, or of a tensor that is updated whole."""

    members: list[ManagedParameter]
    """Its parameters; for a span those of its group and age, even if this rank has none of their elements."""
    where: slice | int
    """Elements of the bucket, or the slot of the tensor."""
    target: torch.Tensor
    values: dict[str, Any]
    """By name; to be read and written."""

    def tensors(self) -> list[str]:
        """The names of what is kept for each element, and not once for all."""
        kept = {name: value for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        if isinstance(self.where, slice):
            return [name for name, value in kept.items() if value.shape == self.target.shape]
        return [name for name, value in kept.items() if value.ndim > 0]


def kept_states(bucket: Bucket) -> Iterator[KeptState]:
    """All that the optimizer keeps on this rank of a bucket: of spans, then of tensors that are updated whole."""
    if not isinstance(bucket, TrainedBucket):
        return
    update, members = bucket.update, bucket.spec.parameters
    for span in update.spans:
        alike = [each for each in members if each.span == span.key and not each.is_updated_whole]
        where = slice(update.where.start + span.where.start, update.where.start + span.where.stop)
        yield KeptState(alike, where, span.target, update.span_state(span))
    for slot, target in update.whole.targets.items() if update.whole is not None else ():
        yield KeptState([members[slot]], slot, target, update.whole_state(slot))


def replaced_weights(bucket: Bucket) -> Iterator[NamedPiece]:
    """Yield the pieces that this rank fills when weights are replaced, between `begin_refill` and `end_refill`. For
    frozen weights it is the rank's own range, even if all ranks hold all: the other parts come by a gather."""
    if isinstance(bucket, TrainedBucket):
        yield from pieces(bucket, WEIGHT)
    else:
        yield from cut_pieces(bucket, WEIGHT, bucket.weights.shard, bucket.weights.own)


def roles(bucket: Bucket) -> list[str]:
    """The roles in which this rank holds tensors of a bucket, the gradient left out."""
    own = [WEIGHT] if current_average(bucket) is None else [WEIGHT, AVERAGE]
    return [*own, *sorted({name for kept in kept_states(bucket) for name in kept.tensors()})]


def current_average(bucket: Bucket) -> torch.Tensor | None:
    """The average of the weights that this rank updates, at rest; None where none is kept."""
    if not isinstance(bucket, TrainedBucket):
        return None
    bucket.update.home.put_away()
    return bucket.update.kept.average


def capture(bucket: Bucket, role: str, dtype: torch.dtype, collectives: Collectives) -> torch.Tensor:
    """(padded_numel,) of one role, from all ranks, 0 where there is none. Collective; one bucket is whole meanwhile.

    Not for what is kept of tensors that are updated whole: their owners have that (`pieces`).
    """
    if role == WEIGHT:
        part = current_weight(bucket).to(collectives.world.device)
    else:
        where = kept_range(bucket)
        part = torch.zeros(where.stop - where.start, dtype=dtype, device=collectives.world.device)
        for piece in pieces(bucket, role):
            if piece.in_bucket is not None:
                part[piece.in_bucket.start - where.start : piece.in_bucket.stop - where.start] = piece.values
    if part.numel() == bucket.layout.padded_numel:
        return part
    full = part.new_empty(bucket.layout.padded_numel)
    what = "master weights" if role == WEIGHT else role
    collectives.gather_now(f"{what} of {bucket.spec.name}", full, part)
    return full


def full_weights(bucket: Bucket, collectives: Collectives) -> Iterator[tuple[ManagedParameter, torch.Tensor]]:
    """Each parameter of a bucket and its full master weight, a view. Collective, once, when the first is asked for."""
    flat = capture(bucket, WEIGHT, torch.float32, collectives)
    for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
        yield managed, slot_view(flat, slot)


def current_weight(bucket: Bucket) -> torch.Tensor:
    """The weights that this rank keeps, with what others than the engine have written into the parameters."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.current_weight()
    bucket.weights.home.put_away()
    bucket.weights.take_writes()
    return bucket.weights.held


def kept_range(bucket: Bucket) -> slice:
    """The elements of a bucket whose weights this rank keeps up to date."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.where
    return bucket.weights.own if bucket.weights.plan.shards_parameters else slice(0, bucket.layout.padded_numel)


def cut_pieces(bucket: Bucket, role: str, values: torch.Tensor, where: slice) -> Iterator[NamedPiece]:
    """The pieces of `values`, which lie at `where` in the bucket, parameter by parameter."""
    for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
        start, end = max(slot.offset, where.start), min(slot.end, where.stop)
        if start < end:
            in_tensor = slice(start - slot.offset, end - slot.offset)
            yield NamedPiece(
                managed, role, values[start - where.start : end - where.start], in_tensor, slice(start, end)
            )
