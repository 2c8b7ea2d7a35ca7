"""One optimizer step: the norm over all ranks, whether to skip, the update."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.agreement import StepStamps
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.parts.norm import StepSquares, clip_coefficient
from zerotrain.engine.model.ranges import named_range
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.precision.loss_scale import LossScaler
from zerotrain.engine.results import StepResult
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.update.nonfinite import SkippedSteps, find_nonfinite

_ENDED = object()


class OptimizerStep:
    """The parts of a step that are the same for all steps of an engine.

    Args:
        stamps: the values that ranks compare once a step.
        loss_scaler: None for no scaling.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        collectives: Collectives,
        stamps: StepStamps,
        loss_scaler: LossScaler | None,
    ) -> None:
        self._model, self._collectives, self._stamps = model, collectives, stamps
        self._max_grad_norm = options.given.max_grad_norm
        self._loss_scaler = loss_scaler
        self.skipped_steps = SkippedSteps(options.given.max_skipped_steps, loss_scaler)

    def run(
        self,
        schedule: Schedule,
        param_groups: Sequence[Mapping[str, object]],
        losses: Sequence[torch.Tensor],
        signal: int = 0,
        average_share: float | None = None,
    ) -> tuple[StepResult, str | None]:
        """Clip and update, or skip a gradient that is not finite.

        Args:
            losses: of the step's micro-batches, on this rank.
            signal: this rank's number for the others, sent with the norm.
            average_share: see `Kept.update_average`; None: no average is due.

        Returns:
            The result; and the reason why training must not go on after it, if any.
        """
        fetch_next(schedule.trained, 0)
        schedule.reductions.finish()
        self._stamps.written, self._stamps.signal = written_to(schedule.buckets), signal
        squares = schedule.reductions.squares
        norm_value, coefficient_value, signals, coefficient, stamps = self._norm(squares, param_groups)
        loss_scale = 1.0 if self._loss_scaler is None else self._loss_scaler.scale
        is_exact = all(bucket.gradient.reduction.has_exact_norm for bucket in schedule.trained)
        if not math.isfinite(norm_value) and not is_exact:
            # Taken in fp32. A gradient of 1e20 is finite, and its square is not.
            squares = StepSquares()
            for bucket in schedule.trained:
                squares.add(bucket.gradient.reduction.take_squares(loss_scale, exact=True))
            norm_value, coefficient_value, signals, coefficient, stamps = self._norm(squares, param_groups)
        skipped = not math.isfinite(norm_value)
        if skipped:
            self._stamps.require_same(stamps, param_groups)
        reason = self.skipped_steps.reason_to_stop(skipped=skipped)
        if reason is not None:
            reason += f". {find_nonfinite(self._model, schedule.trained, losses, self._collectives)}"
        if skipped:
            schedule.drop_gradients()
        else:
            is_scaled = self._max_grad_norm is not None or self._loss_scaler is not None
            factor = coefficient / loss_scale if is_scaled else None
            update_all(schedule.trained, schedule.gathers, factor, average_share)
            schedule.end_update()
        for each in schedule.buckets:
            each.weights.writes.digest = 0
        return StepResult(norm_value, coefficient_value, skipped, loss_scale, tuple(map(int, signals))), reason

    def _norm(
        self, squares: StepSquares, param_groups: Sequence[Mapping[str, object]]
    ) -> tuple[float, float, list[float], torch.Tensor, torch.Tensor]:
        """The norm over all ranks, what to clip by it, and the ranks' signals as numbers; what to clip by and the
        ranks' stamps on the device."""
        with named_range("norm of", "the gradient"):
            norm, stamps, signals = self._stamps.stamped_norm(squares.digit_sums(), param_groups)
        coefficient = clip_coefficient(norm, self._max_grad_norm)
        # A step's one wait for the device.
        norm_value, coefficient_value, *told = torch.cat([torch.stack([norm, coefficient]), signals]).tolist()
        return norm_value, coefficient_value, told, coefficient, stamps


def written_to(buckets: Sequence[Bucket]) -> int:
    """Look for what others than the engine have written into the weights since the last step: a number made of it."""
    written = 0
    for bucket in buckets:
        bucket.weights.take_writes()
        written ^= bucket.weights.writes.digest
    return written


def update_all(
    trained: Sequence[TrainedBucket], gathers: Gathers, factor: torch.Tensor | None, average_share: float | None = None
) -> None:
    """Update every bucket, drop its gradient, and issue the gather of what was updated.

    The update of a bucket is an iterator, since whole tensors travel: it pauses where something is on the wire, and
    the updates of other buckets go on meanwhile.

    Args:
        factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.
        average_share: see `Kept.update_average`; None: no average is due.
    """
    gathers.prepare_updated(trained)
    under_way: deque[Iterator[None]] = deque()
    for place, bucket in enumerate(trained):
        fetch_next(trained, place)
        under_way.appendleft(_update(bucket, gathers, factor, average_share))
        _advance(under_way)
        bucket.gradient.drop()
    while under_way:
        _advance(under_way)


def fetch_next(trained: Sequence[TrainedBucket], place: int) -> None:
    """Begin to fetch what the update of this bucket and the next will need, where it lies off the device."""
    for bucket in trained[place : place + 2]:
        if bucket.update.is_away:
            bucket.update.fetch()


def _update(
    bucket: TrainedBucket, gathers: Gathers, factor: torch.Tensor | None, average_share: float | None
) -> Iterator[None]:
    yield from bucket.update.run(factor, average_share)
    gathers.gather_updated(bucket)


def _advance(under_way: deque[Iterator[None]]) -> None:
    """Resume each update once, the newest first: what it sends is on the wire while the older ones compute."""
    for update in list(under_way):
        if next(update, _ENDED) is _ENDED:
            under_way.remove(update)
