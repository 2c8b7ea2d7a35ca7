"""The one writer of state: whatever comes into the buckets of an engine comes from a `Source`, through `fill`.

It goes bucket by bucket and role by role, so a rank needs a bucket beside what it holds, and where ranges are read, as
out of files, some MiB.
"""

from collections.abc import Sequence

import torch

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.state.named import KeptState, NamedPiece, cut_pieces, kept_states, replaced_weights
from zerotrain.engine.state.source import KeptOnce, KeptTensor, Source
from zerotrain.engine.state.together import on_all
from zerotrain.sharding.units import ManagedParameter

HALF = "the engine holds a part of it: load one that can be read before you continue training"


def fill(source: Source, buckets: Sequence[Bucket], collectives: Collectives) -> None:
    """Replace the weights of buckets by those of a source, and what the optimizer keeps if the source has that.
    Collective, between steps. Names and shapes fit: who makes a source has checked them.

    Raises:
        CheckpointError: on every rank; one of them could not read, and the engine holds a part.
    """
    for bucket in buckets:
        bucket.weights.begin_refill()  # waits for gathers: not where one rank alone may fail

    def read() -> None:
        for bucket in buckets:
            source.begin(bucket, WEIGHT)
            for piece in replaced_weights(bucket):
                source.read(piece)
            fill_state(source, bucket)
            bucket.forget()
        source.fill_rest()

    if source.is_collective:
        read()
    else:
        on_all(collectives, read, doing=source.doing, left=HALF)
    for bucket in buckets:
        if isinstance(bucket, TrainedBucket):
            bucket.update.refilled()
        bucket.weights.end_refill()
        bucket.forget()


def fill_state(source: Source, bucket: Bucket) -> None:
    """Replace what the optimizer keeps of one bucket, and the average of its weights: a change of the stage leaves the
    weights themselves where they are."""
    if not isinstance(bucket, TrainedBucket) or not source.has_state:
        return
    states = [(kept, source.keeps(_with_elements(kept.members))) for kept in kept_states(bucket)]
    for kept, keeps in states:
        kept.values.clear()
        if not keeps:
            kept.values.update(bucket.update.state_at_first(kept.members[0].group, kept.target))
        once = {name: each for name, each in keeps.items() if isinstance(each, KeptOnce)}
        kept.values.update((name, each.placed(bucket.update.device)) for name, each in once.items())
    everything = [item for each in bucket.spec.parameters for item in source.keeps(each).items()]
    for role in sorted({name for name, each in everything if isinstance(each, KeptTensor)}):
        source.begin(bucket, role)
        for kept, keeps in states:
            if isinstance(tensor := keeps.get(role), KeptTensor):
                kept.values[role] = _values(source, bucket, role, kept, tensor)
        bucket.update.home.put_away()
    bucket.update.kept.average = _average(source, bucket) if source.has_average else None
    bucket.update.home.put_away()
    bucket.update.home.forget()


def _average(source: Source, bucket: TrainedBucket) -> torch.Tensor:
    source.begin(bucket, AVERAGE)
    where = bucket.update.where
    values = source.hand_over(bucket, AVERAGE, where)
    if values is None:
        values = torch.zeros_like(bucket.update.master_weight)
        for piece in cut_pieces(bucket, AVERAGE, values, where):
            source.read(piece)
    return values


def _with_elements(members: Sequence[ManagedParameter]) -> ManagedParameter:
    """A parameter that tells what is kept of all: nothing is saved of one without elements."""
    return next((each for each in members if each.parameter.numel() > 0), members[0])


def _values(source: Source, bucket: TrainedBucket, role: str, kept: KeptState, tensor: KeptTensor) -> torch.Tensor:
    values = source.hand_over(bucket, role, kept.where)
    if values is None and isinstance(kept.where, slice):
        values = torch.zeros_like(kept.target, dtype=tensor.dtype)
        for piece in cut_pieces(bucket, role, values, kept.where):
            source.read(piece)
    elif values is None:
        assert tensor.shape is not None
        values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=bucket.update.master_weight.device)
        source.read(NamedPiece(kept.members[0], role, values, None, None))
    return values
