"""The one writer of state: whatever comes into the buckets of an engine comes from a `Source`, through `fill`.

It goes bucket by bucket and role by role, so a rank needs a bucket beside what it holds, and where ranges are read, as
out of files, some MiB.
"""

from collections.abc import Sequence

import torch

from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.parts.spans import Span
from zerotrain.engine.state.named import NamedPiece, cut_pieces, replaced_weights
from zerotrain.engine.state.source import Keeps, KeptOnce, KeptTensor, Source
from zerotrain.engine.state.together import on_all
from zerotrain.sharding.units import ManagedParameter

HALF = "the engine holds a part of it: load one that can be read before you train on"


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
    """Replace what the optimizer keeps of one bucket alone: a change of the stage leaves weights where they are."""
    if not isinstance(bucket, TrainedBucket) or not source.has_state:
        return
    update, members = bucket.update, bucket.spec.parameters
    spans = [(span, source.keeps(_member_of(span, members))) for span in update.spans]
    owned = [(slot, source.keeps(members[slot])) for slot in (update.whole.targets if update.whole is not None else ())]
    states = [(update.span_state(span), keeps) for span, keeps in spans]
    for state, keeps in (*states, *((update.whole_state(slot), keeps) for slot, keeps in owned)):
        state.clear()
        state.update((name, each.placed(update.device)) for name, each in keeps.items() if isinstance(each, KeptOnce))
    for role in sorted({role for each in members for role in _tensors(source.keeps(each))}):
        source.begin(bucket, role)
        for span, keeps in spans:
            if role in (tensors := _tensors(keeps)):
                update.span_state(span)[role] = _of_span(source, bucket, role, span, tensors[role])
        for slot, keeps in owned:
            if role in (tensors := _tensors(keeps)):
                update.whole_state(slot)[role] = _of_whole(source, bucket, role, slot, tensors[role])
    update.home.put_away()
    update.home.forget()


def _member_of(span: Span, members: Sequence[ManagedParameter]) -> ManagedParameter:
    """A parameter that tells what is kept of a span: nothing is saved of one without elements."""
    alike = [each for each in members if each.span == span.key and not each.is_updated_whole]
    return next((each for each in alike if each.parameter.numel() > 0), alike[0])


def _tensors(keeps: Keeps) -> dict[str, KeptTensor]:
    return {name: each for name, each in keeps.items() if isinstance(each, KeptTensor)}


def _of_span(source: Source, bucket: TrainedBucket, role: str, span: Span, kept: KeptTensor) -> torch.Tensor:
    start = bucket.update.where.start
    where = slice(start + span.where.start, start + span.where.stop)
    values = source.hand_over(bucket, role, where)
    if values is None:
        values = torch.zeros_like(span.target, dtype=kept.dtype)
        for piece in cut_pieces(bucket, role, values, where):
            source.read(piece)
    return values


def _of_whole(source: Source, bucket: TrainedBucket, role: str, slot: int, kept: KeptTensor) -> torch.Tensor:
    values = source.hand_over(bucket, role, slot)
    if values is None:
        assert kept.shape is not None
        values = torch.zeros(kept.shape, dtype=kept.dtype, device=bucket.update.master_weight.device)
        source.read(NamedPiece(bucket.spec.parameters[slot], role, values, None, None))
    return values
