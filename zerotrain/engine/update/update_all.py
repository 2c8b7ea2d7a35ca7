"""The update of all buckets, one behind the other, with what travels between them under way."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from zerotrain.engine.buckets.bucket import TrainedBucket
from zerotrain.engine.schedule.gathers import Gathers

_ENDED = object()


def update_all(trained: Sequence[TrainedBucket], gathers: Gathers, factor: torch.Tensor | None) -> None:
    """Update every bucket, drop its gradient, and issue the gather of what was updated.

    The update of a bucket is an iterator, since whole tensors travel: it pauses where something is on the wire, and
    the updates of other buckets go on meanwhile.

    Args:
        factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.
    """
    gathers.prepare_updated(trained)
    under_way: deque[Iterator[None]] = deque()
    for bucket in trained:
        under_way.appendleft(_update(bucket, gathers, factor))
        _advance(under_way)
        bucket.gradient.drop()
    while under_way:
        _advance(under_way)


def _update(bucket: TrainedBucket, gathers: Gathers, factor: torch.Tensor | None) -> Iterator[None]:
    yield from bucket.update.run(factor)
    gathers.gather_updated(bucket)


def _advance(under_way: deque[Iterator[None]]) -> None:
    """Resume each update once, the newest first: what it sends is on the wire while the older ones compute."""
    for update in list(under_way):
        if next(update, _ENDED) is _ENDED:
            under_way.remove(update)
