"""One optimizer step: the norm over all ranks, whether to skip, the update."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.device.kinds import device_of, reading
from zerotrain.engine.agreement import CANNOT_REPLAY, Exchanged, StepStamps, parted
from zerotrain.engine.buckets.bucket import Bucket, JointUpdate, TrainedBucket
from zerotrain.engine.buckets.norm import StepSquares, clip_coefficient
from zerotrain.engine.buckets.update import BucketUpdate
from zerotrain.engine.groups.optimizers import is_torchs_own
from zerotrain.engine.model.forward import named_range
from zerotrain.engine.model.precision import LossScaler
from zerotrain.engine.results import StepResult
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.state.named import GRADIENT, pieces
from zerotrain.errors import EngineStateError, argument
from zerotrain.settings import EngineConfig

# The update told to a GPU before the host knows whether the step is skipped.
#
# The host would wait for the norm, while the GPU does all that it was told, and then tell it the update while it has
# nothing to do: of GPT-2 on an H200 that took 3 of 38 ms. So the update is told at once, with the answer on the GPU
# (`found_inf`, torch's own protocol for loss scaling), and the host waits while the GPU updates.


def can_go_ahead(update: BucketUpdate) -> bool:
    """Whether an update happens on a GPU, by an optimizer whose step can be turned off there: torch's own with
    `fused=True`, or compiled. A class of somebody else's may have inherited that it can, and not do it. The same on all
    ranks. A CPU does not wait."""
    if update.is_away or update.whole is not None or device_of(update.device).is_host:
        return False
    optimizer = update.optimizer
    if optimizer is None or update.is_compiled:
        return True
    can_be_off = getattr(optimizer, "_step_supports_amp_scaling", False) and is_torchs_own(optimizer)
    return can_be_off and all(group.get("fused", True) for group in optimizer.param_groups)


class UpdateAhead:
    """Updates every bucket if the norm is finite, and changes no bit if it is not. Then comes `end`, or for a step that
    is skipped `take_back`.

    Nothing is sent before: ranks that have not done the same since the last step would wait for each other.

    Args:
        factor: as of `update_all`.
        norm: 0-dim.
    """

    def __init__(self, updates: Sequence[JointUpdate], factor: torch.Tensor | None, norm: torch.Tensor) -> None:
        self._trained = [bucket for joint in updates for bucket in joint.buckets]
        self._began: list[tuple[torch.optim.Optimizer, torch.Tensor]] = []
        """The tensors whose state an optimizer has begun in this step."""
        is_finite = norm.isfinite()
        if factor is not None:
            factor = torch.where(is_finite, factor, 1.0).to(torch.float32)  # as all master weights are
        is_off = is_finite.logical_not().to(torch.float32)
        for bucket in self._trained:
            bucket.weights.about_to_change()
            bucket.weights.finish_gather()
            update = bucket.update
            if (optimizer := update.optimizer) is not None:
                self._began += [(optimizer, span.target) for span in update.spans if span.target not in optimizer.state]
        for joint in updates:
            list(joint.renew(factor, is_off=is_off))  # without whole tensors it never pauses

    def take_back(self) -> None:
        """The step is skipped: forget its new state, with values that nobody has set."""
        for optimizer, target in self._began:
            optimizer.state.pop(target, None)

    def end(self, gathers: Gathers) -> None:
        """The step is made: drop the gradients, and issue the gathers of what was updated."""
        gathers.prepare_updated(self._trained)
        for bucket in self._trained:
            bucket.update.changed()
            gathers.gather_updated(bucket)
            bucket.gradient.drop()


# The places where a gradient is not finite: told when so many steps were skipped that training stops.


_FINITE, _INFINITE, _NAN = 0, 1, 2
_WORDS = {_INFINITE: "inf", _NAN: "nan"}


def find_nonfinite(
    model: torch.nn.Module, trained: Sequence[TrainedBucket], losses: Sequence[torch.Tensor], collectives: Collectives
) -> str:
    """Name the first parameter with a wrong reduced gradient, and the ranks with a wrong loss. Collective.

    First is meant in the order of the backward: of the parameters that are not finite the last of the model. Parameters
    before it in the model get their gradients from there.

    Args:
        losses: of the step's micro-batches, on this rank.
    """
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    nonfinite = [(-1, _FINITE)]
    for bucket in trained:
        for piece in pieces(bucket, GRADIENT):  # of this rank's shard
            if (kind := _kind(piece.values)) != _FINITE:
                nonfinite.append((order[piece.managed.names[0]], kind))
    position, kind = max(nonfinite)
    loss_kind = max((_kind(loss) for loss in losses), default=_FINITE)
    local_numbers = torch.tensor([position, kind, loss_kind], dtype=torch.int64, device=collectives.world.device)
    ranks = collectives.gather_small(local_numbers, name="where the gradient is not finite").tolist()
    position, kind = max((position, kind) for position, kind, _ in ranks)
    bad_losses = [f"{_WORDS[kind]} on rank {rank}" for rank, (_, _, kind) in enumerate(ranks) if kind != _FINITE]
    said_of_losses = f"the loss was {', '.join(bad_losses)}" if bad_losses else "the loss was finite on every rank"
    return f"In the backward it was first {_WORDS[kind]} in {list(order)[position]}; {said_of_losses}"


def _kind(values: torch.Tensor) -> int:
    if values.isnan().any():
        return _NAN
    return _INFINITE if values.isinf().any() else _FINITE


_ENDED = object()


@dataclass(eq=False)
class OptimizerStep:
    """The parts of a step that are the same for all steps of an engine."""

    model: torch.nn.Module
    config: EngineConfig
    collectives: Collectives
    stamps: StepStamps
    """The values that ranks compare once a step."""
    loss_scaler: LossScaler | None
    graphs: Any = None
    """The `StepGraphs` of `zerotrain.engine.graphs`; None: no step is one."""
    num_skipped_in_a_row: int = 0

    def run(
        self,
        schedule: Schedule,
        param_groups: Sequence[Mapping[str, object]],
        losses: Sequence[torch.Tensor],
        loss: torch.Tensor,
        average_share: float | None,
        refusal: EngineStateError | None,
    ) -> tuple[StepResult, str | None]:
        """Clip and update, or skip a gradient that is not finite.

        Args:
            losses: of the step's micro-batches, on this rank.
            loss: 0-dim fp64, the mean of this rank's virtual ranks; for all ranks to know the mean over all.
            average_share: see `BucketUpdate.update_average`; None: no average is due.
            refusal: raised in place of an update, unless the ranks' groups differ.

        Returns:
            The result; and the reason why training must not go on after it, if any.
        """
        fetch_next(schedule.updates, 0)
        if self.graphs is not None:
            self.graphs.begin_update()
        schedule.reductions.finish()
        self.stamps.writes_digest = written_to(schedule.buckets)
        loss_scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        exchanged, factor, read = self._norm(schedule.reductions.squares, loss, param_groups, loss_scale)
        ahead = None
        if self.graphs is not None and self.graphs.is_replaying and refusal is None:
            ahead = self.graphs.update(schedule.updates, factor, exchanged.norm)
        elif refusal is None and average_share is None and all(can_go_ahead(each.update) for each in schedule.trained):
            ahead = UpdateAhead(schedule.updates, factor, exchanged.norm)
        norm, coefficient, mean_loss, *rest = read()
        if ahead is not None and not math.isfinite(norm):
            ahead.take_back()
            ahead = None
        signals = tuple(map(int, rest[len(exchanged.digit_sums) :]))
        if self.graphs is not None:
            signals, wishes = parted(signals)
            self.graphs.hear(wishes)
        if not math.isfinite(norm) and not schedule.trained[0].gradient.reduction.has_exact_norm:
            # Taken in fp32. A gradient of 1e20 is finite, and its square is not.
            squares = StepSquares()
            for trained in schedule.trained:
                squares.add(trained.gradient.reduction.take_squares(loss_scale, exact=True))
            exchanged, factor, read = self._norm(squares, loss, param_groups, loss_scale)
            norm, coefficient, mean_loss, *rest = read()
        digits = rest[: len(exchanged.digit_sums)]
        skipped = not math.isfinite(norm)
        if skipped:
            self.stamps.require_same(exchanged.stamps, param_groups)
        if refusal is not None:
            raise refusal
        reason = self._reason_to_stop(skipped=skipped)
        if reason is not None:
            reason += f". {find_nonfinite(self.model, schedule.trained, losses, self.collectives)}"
        if skipped:
            schedule.drop_gradients()
        else:
            if ahead is not None:
                ahead.end(schedule.gathers)
            else:
                update_all(schedule.updates, schedule.gathers, factor, average_share)
            schedule.end_update()
        for bucket in schedule.buckets:
            bucket.weights.writes.digest = 0
        result = StepResult(
            grad_norm=norm,
            clip_coefficient=coefficient,
            skipped=skipped,
            loss_scale=loss_scale,
            signals=signals,
            mean_loss=mean_loss,
            update_hash=update_hash(digits, coefficient, loss_scale, param_groups),
        )
        return result, reason

    def _reason_to_stop(self, *, skipped: bool) -> str | None:
        """A step was done or skipped: None while training may go on."""
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return None
        rate = argument("the optimizer's lr")
        if self.loss_scaler is not None and self.loss_scaler.scale <= 1.0:
            return (
                f"the gradient overflows fp16 even at a loss scale of 1; use {argument('precision', 'bf16')} or lower "
                f"{rate}"
            )
        if self.num_skipped_in_a_row < self.config.max_skipped_steps:
            return None
        in_a_row = "" if self.config.max_skipped_steps == 1 else f" in {self.num_skipped_in_a_row} steps in a row"
        return (
            f"the gradient was not finite{in_a_row}; lower {rate}, look at the data, or let "
            f"more steps be skipped {argument('(max_skipped_steps)')}"
        )

    def _norm(
        self, squares: StepSquares, loss: torch.Tensor, param_groups: Sequence[Mapping[str, object]], loss_scale: float
    ) -> tuple[Exchanged, torch.Tensor | None, Callable[[], list[float]]]:
        """Numbers of all ranks, and what gradients are multiplied with (None for 1), on the device; and what waits for
        them, a step's one wait for the device: it gives the norm, its coefficient, the loss, the digit sums and the
        signals."""
        sums = squares.digit_sums()
        if self.stamps.wish == CANNOT_REPLAY:
            sums = torch.full_like(sums, math.inf)  # no rank is to update with this gradient
        with named_range("norm of", "the gradient"):
            exchanged = self.stamps.exchanged(sums, loss, param_groups)
        coefficient = clip_coefficient(exchanged.norm, self.config.max_grad_norm)
        numbers = torch.stack([exchanged.norm, coefficient, exchanged.loss])
        # No watchdog sees what a graph waits for.
        timeout_s = None if self.graphs is None else self.collectives.world.timeout_s
        read = reading(torch.cat([numbers, exchanged.digit_sums, exchanged.signals]), timeout_s)
        is_scaled = self.config.max_grad_norm is not None or self.loss_scaler is not None
        factor = coefficient / loss_scale if is_scaled else None
        return exchanged, factor, read if timeout_s is None else partial(self._read_in_time, read)

    def _read_in_time(self, read: Callable[[], list[float]]) -> list[float]:
        with self.collectives.world.whereabouts.blame_others("norm of the gradient"):
            return read()


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
    facts = [*digits, coefficient, loss_scale, *(rate for rate in rates if isinstance(rate, float | int))]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def written_to(buckets: Sequence[Bucket]) -> int:
    """Look for what others than the engine have written into the weights since the last step: a number made of it."""
    digest = 0
    for bucket in buckets:
        bucket.weights.take_writes()
        digest ^= bucket.weights.writes.digest
    return digest


def update_all(
    updates: Sequence[JointUpdate], gathers: Gathers, factor: torch.Tensor | None, average_share: float | None = None
) -> None:
    """Update every bucket, drop its gradient, and issue the gather of what was updated.

    An update is an iterator, since whole tensors travel: it pauses where something is on the wire, and the updates of
    other buckets go on meanwhile.

    Args:
        factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.
        average_share: see `BucketUpdate.update_average`; None: no average is due.
    """

    def updating(joint: JointUpdate) -> Generator[None]:
        yield from joint.run(factor, average_share)
        for bucket in joint.buckets:
            gathers.gather_updated(bucket)

    gathers.prepare_updated([bucket for joint in updates for bucket in joint.buckets])
    under_way: deque[Generator[None]] = deque()
    try:
        for place, joint in enumerate(updates):
            fetch_next(updates, place)
            under_way.appendleft(updating(joint))
            _advance(under_way)
            for bucket in joint.buckets:
                bucket.gradient.drop()
        while under_way:
            _advance(under_way)
    finally:
        for update in under_way:  # one has failed
            update.close()


def fetch_next(updates: Sequence[JointUpdate], place: int) -> None:
    """Begin to fetch what this update and the next will need, where it lies off the device."""
    for joint in updates[place : place + 2]:
        for bucket in joint.buckets:
            if bucket.update.is_away:
                bucket.update.fetch()


def _advance(under_way: deque[Generator[None]]) -> None:
    """Resume each update once, the newest first: what it sends is on the wire while the older ones compute."""
    for update in list(under_way):
        if next(update, _ENDED) is _ENDED:
            under_way.remove(update)
