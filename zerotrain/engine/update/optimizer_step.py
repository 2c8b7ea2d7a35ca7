"""One optimizer step: the norm over all ranks, whether to skip, the update."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.device.kinds import reading
from zerotrain.engine.agreement import Exchanged, StepStamps
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.norm import StepSquares, clip_coefficient
from zerotrain.engine.model.forward import named_range
from zerotrain.engine.model.precision import LossScaler
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.results import StepResult
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.update.ahead import UpdateAhead, can_go_ahead
from zerotrain.engine.update.nonfinite import SkippedSteps, find_nonfinite
from zerotrain.errors import EngineStateError

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
        self.max_grad_norm = options.given.max_grad_norm
        """The L2 norm that the whole gradient is clipped to; None: it is not clipped."""
        self._loss_scaler = loss_scaler
        self.skipped_steps = SkippedSteps(options.given.max_skipped_steps, loss_scaler)

    def run(
        self,
        schedule: Schedule,
        param_groups: Sequence[Mapping[str, object]],
        losses: Sequence[torch.Tensor],
        loss: torch.Tensor,
        signal: int = 0,
        average_share: float | None = None,
        refusal: EngineStateError | None = None,
    ) -> tuple[StepResult, str | None]:
        """Clip and update, or skip a gradient that is not finite.

        Args:
            losses: of the step's micro-batches, on this rank.
            loss: 0-dim fp64, the mean of this rank's virtual ranks; for all ranks to know the mean over all.
            signal: this rank's number for the others, sent with the norm.
            average_share: see `Kept.update_average`; None: no average is due.
            refusal: raised in place of an update, unless the ranks' groups differ.

        Returns:
            The result; and the reason why training must not go on after it, if any.
        """
        fetch_next(schedule.trained, 0)
        schedule.reductions.finish()
        self._stamps.written, self._stamps.signal = written_to(schedule.buckets), signal
        loss_scale = 1.0 if self._loss_scaler is None else self._loss_scaler.scale
        goes_ahead = refusal is None and average_share is None and can_go_ahead(schedule.trained)
        exchanged, factor, told, ahead = self._norm_of_all(schedule, loss, param_groups, loss_scale, goes_ahead)
        skipped = not math.isfinite(told.norm)
        if skipped:
            self._stamps.require_same(exchanged.stamps, param_groups)
        if refusal is not None:
            raise refusal
        reason = self.skipped_steps.reason_to_stop(skipped=skipped)
        if reason is not None:
            reason += f". {find_nonfinite(self._model, schedule.trained, losses, self._collectives)}"
        if skipped:
            schedule.drop_gradients()
        else:
            if ahead is not None:
                ahead.end(schedule.gathers)
            else:
                update_all(schedule.trained, schedule.gathers, factor, average_share)
            schedule.end_update()
        for each in schedule.buckets:
            each.weights.writes.digest = 0
        result = StepResult(
            grad_norm=told.norm,
            clip_coefficient=told.coefficient,
            skipped=skipped,
            loss_scale=loss_scale,
            signals=told.signals,
            mean_loss=told.loss,
            update_hash=update_hash(told.digit_sums, told.coefficient, loss_scale, param_groups),
        )
        return result, reason

    def _norm_of_all(
        self,
        schedule: Schedule,
        loss: torch.Tensor,
        param_groups: Sequence[Mapping[str, object]],
        loss_scale: float,
        goes_ahead: bool,
    ) -> tuple[Exchanged, torch.Tensor | None, "_Told", UpdateAhead | None]:
        """Take the norm, and read it. Returns what `_norm` does, with the numbers read, and the update if it was made
        ahead of the reading."""
        exchanged, factor, read = self._norm(schedule.reductions.squares, loss, param_groups, loss_scale)
        ahead = UpdateAhead(schedule.trained, factor, exchanged.norm) if goes_ahead else None
        told = read()
        if math.isfinite(told.norm):
            return exchanged, factor, told, ahead
        if ahead is not None:
            ahead.take_back()
        if not all(bucket.gradient.reduction.has_exact_norm for bucket in schedule.trained):
            # Taken in fp32. A gradient of 1e20 is finite, and its square is not.
            squares = StepSquares()
            for bucket in schedule.trained:
                squares.add(bucket.gradient.reduction.take_squares(loss_scale, exact=True))
            exchanged, factor, read = self._norm(squares, loss, param_groups, loss_scale)
            told = read()
        return exchanged, factor, told, None

    def _norm(
        self,
        squares: StepSquares,
        loss: torch.Tensor,
        param_groups: Sequence[Mapping[str, object]],
        loss_scale: float,
    ) -> tuple[Exchanged, torch.Tensor | None, Callable[[], "_Told"]]:
        """Numbers of all ranks, and what gradients are multiplied with (None for 1), on the device; and what waits for
        both and reads them."""
        with named_range("norm of", "the gradient"):
            exchanged = self._stamps.exchanged(squares.digit_sums(), loss, param_groups)
        coefficient = clip_coefficient(exchanged.norm, self.max_grad_norm)
        numbers = torch.stack([exchanged.norm, coefficient, exchanged.loss])
        arriving = reading(torch.cat([numbers, exchanged.digit_sums, exchanged.signals]))

        def read() -> _Told:  # a step's one wait for the device
            norm, coefficient_value, mean_loss, *others = arriving()
            digits, signals = others[: len(exchanged.digit_sums)], others[len(exchanged.digit_sums) :]
            return _Told(norm, coefficient_value, mean_loss, tuple(digits), tuple(map(int, signals)))

        is_scaled = self.max_grad_norm is not None or self._loss_scaler is not None
        return exchanged, coefficient / loss_scale if is_scaled else None, read


class _Told(NamedTuple):
    norm: float
    coefficient: float
    loss: float
    digit_sums: tuple[float, ...]
    signals: tuple[int, ...]


def update_hash(
    digit_sums: Sequence[float], coefficient: float, loss_scale: float, param_groups: Sequence[Mapping[str, object]]
) -> str:
    """16 hexadecimal digits: equal where steps have the same gradient norm to its last digit, clip it by the same
    factor, and update with the same loss scale, learning rates and weight decays.

    It tells nothing of an element's sign or place, which show in the norm of the next step. All gradients that are not
    finite are alike. Rates that lie on a GPU are not read.

    Args:
        digit_sums: (4,) of all ranks, which the norm is made of.
    """
    rates = [group.get(name) for group in param_groups for name in ("lr", "weight_decay")]
    digits = digit_sums if all(map(math.isfinite, digit_sums)) else ["not finite"]
    told = [*digits, coefficient, loss_scale, *(each for each in rates if isinstance(each, float | int))]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


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
    under_way: deque[Generator[None]] = deque()
    try:
        for place, bucket in enumerate(trained):
            fetch_next(trained, place)
            under_way.appendleft(_update(bucket, gathers, factor, average_share))
            _advance(under_way)
            bucket.gradient.drop()
        while under_way:
            _advance(under_way)
    finally:
        for update in under_way:  # one has failed
            update.close()


def fetch_next(trained: Sequence[TrainedBucket], place: int) -> None:
    """Begin to fetch what the update of this bucket and the next will need, where it lies off the device."""
    for bucket in trained[place : place + 2]:
        if bucket.update.is_away:
            bucket.update.fetch()


def _update(
    bucket: TrainedBucket, gathers: Gathers, factor: torch.Tensor | None, average_share: float | None
) -> Generator[None]:
    yield from bucket.update.run(factor, average_share)
    gathers.gather_updated(bucket)


def _advance(under_way: deque[Generator[None]]) -> None:
    """Resume each update once, the newest first: what it sends is on the wire while the older ones compute."""
    for update in list(under_way):
        if next(update, _ENDED) is _ENDED:
            under_way.remove(update)
