"""The update of one bucket after the reduction: clip, run the optimizer, bring the weights up to date.

An update is an iterator, since whole tensors travel: it pauses where something is on the wire, and the updates of
other buckets go on meanwhile.
"""

from collections import deque
from collections.abc import Iterator

import torch

from zerotrain.engine.gradients import BucketGradient
from zerotrain.engine.optimizer import ShardedOptimizer
from zerotrain.engine.ranges import named_range
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPool
from zerotrain.engine.weights import BucketWeights

_ENDED = object()


class Updater:
    """Updates the buckets of a schedule."""

    def __init__(self, schedule: Schedule, optimizer: ShardedOptimizer, *, master_pool: ScratchPool) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._pool = master_pool

    def update_all(self, factor: torch.Tensor | None) -> None:
        """Update every bucket and drop its gradient.

        Args:
            factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.
        """
        under_way: deque[Iterator[None]] = deque()
        for index, (weights, gradient) in enumerate(self._schedule.trained):
            under_way.appendleft(self._update(index, weights, gradient, factor))
            _advance(under_way)
            gradient.drop()
        while under_way:
            _advance(under_way)

    def _update(
        self, index: int, weights: BucketWeights, gradient: BucketGradient, factor: torch.Tensor | None
    ) -> Iterator[None]:
        """Update one bucket; its gradient is no longer needed after the first pause."""
        with named_range("optimizer", weights.spec.name):
            values = gradient.reduced()
            scratch = None
            if gradient.precision.separate_master:
                scratch = self._pool.take(values.numel())
                values = scratch.storage[: values.numel()].copy_(values)
            if factor is not None:
                values.mul_(factor.to(values.dtype))
            whole_tensors = self._optimizer.step(index, values)
            if scratch is not None:
                self._pool.give_back(scratch)
        yield from whole_tensors
        weights.refresh()
        self._schedule.gather_updated(weights)


def _advance(under_way: deque[Iterator[None]]) -> None:
    """Resume each update once, the newest first: what it sends is on the wire while the older ones compute."""
    for update in list(under_way):
        if next(update, _ENDED) is _ENDED:
            under_way.remove(update)
