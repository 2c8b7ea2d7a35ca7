"""A bucket at run time: three parts, each on a way of its own; and the buckets that are updated together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zerotrain.comm.handles import Scratch
from zerotrain.device.memory import give_back_freed
from zerotrain.engine.buckets.compiled_update import number_on
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import Home
from zerotrain.engine.buckets.update import BucketUpdate, step_on_lent
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.buckets.whole_tensors import Updates
from zerotrain.engine.groups.optimizers import widened_state
from zerotrain.engine.model.forward import named_range
from zerotrain.errors import EngineStateError
from zerotrain.offload.tier import Crossing
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout


@dataclass(eq=False)
class Bucket:
    """A rank's state of the parameters of one bucket, and their place in a step."""

    weights: BucketWeights
    stays_full: bool = False
    """Kept from the forward to the backward: the resident root, the last unit of the forward, what is read without
    an announcing hook, and what has no announced backward."""
    awaits_backward: bool = False
    """A forward since the last step left it full for its backward. Other calls between may free it."""
    is_read_unannounced: bool = False
    """Whether a parameter of it was read where no hook had announced it: its gradient may come from anywhere."""

    spec: BucketSpec = field(init=False)
    layout: BucketLayout = field(init=False)

    def __post_init__(self) -> None:
        self.spec, self.layout = self.weights.spec, self.weights.layout

    @property
    def homes(self) -> list[Home]:
        """The homes of what it may keep off the device."""
        return [self.weights.home]

    def at_rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Home.at_rest` of what it keeps off the device."""
        for home in self.homes:
            tensor = home.at_rest(tensor)
        return tensor

    def forget(self) -> None:
        """It was looked at, and others will be: what that took is given back, to the system where it was memory."""
        for home in self.homes:
            home.forget()
        give_back_freed()

    def leave(self) -> None:
        """Others have taken over what is kept of it: give back what it has off the device."""
        for home in self.homes:
            home.leave()


@dataclass(eq=False, kw_only=True)
class TrainedBucket(Bucket):
    """A bucket of parameters that train."""

    gradient: BucketGradient
    update: BucketUpdate

    @property
    def homes(self) -> list[Home]:
        return [*super().homes, self.update.home]


# One call of the optimizer for several buckets.


JOINT_SHARE, MIN_JOINT_NUMEL = 8, 2**20
"""Buckets are updated together up to this share of what a rank updates, or up to so many elements if no gradient is
widened for it: a call takes a tenth of a millisecond of the host, and a GPU waits for it. Not all at once: in 16 bits
their gradients are held in fp32 together, and the gather of one is under way while the next are updated."""


class JointUpdate:
    """The update of neighbouring buckets by one call of the optimizer. It computes each span by itself: the bits are
    those of a call for each bucket, and each bucket keeps its optimizer's state.

    Args:
        buckets: more than one only where each can be joined, see `join_updates`.
    """

    def __init__(self, buckets: Sequence[TrainedBucket]) -> None:
        self.buckets = buckets
        self._updates = [bucket.update for bucket in buckets]
        self._groups, self._pool = self._updates[0].groups, self._updates[0].pool
        self._lent_numel = sum(update.master_weight.numel() for update in self._updates if update.has_copy)
        self._optimizer = self._updates[0].optimizer
        if len(buckets) > 1 and not self._updates[0].is_compiled:
            spans = [span for update in self._updates for span in update.spans]
            self._optimizer = self._groups.optimizer_of((span.key[0], span.target) for span in spans)
            if self._optimizer is not None:
                self._optimizer.state.clear()

    def run(self, factor: torch.Tensor | None, average_share: float | None = None) -> Iterator[None]:
        """Update the buckets from their reduced gradients, read up to the first pause.

        Args:
            factor: 0-dim, what gradients are multiplied with: clipped, and without the loss scale; None for 1.
            average_share: see `BucketUpdate.update_average`; None: the average is not due, or there is none.

        Returns:
            The work. It pauses where whole tensors are on the wire or a gradient is on its way to the host, for other
            buckets to go on meanwhile; every rank must resume it at the same points.
        """
        for bucket in self.buckets:
            bucket.weights.about_to_change()
        first = self._updates[0]
        if first.crossing is not None:
            yield from self._run_across(first.crossing, factor, average_share)
        else:
            with first.at_hand() if first.is_away else nullcontext():
                yield from self.renew(factor, average_share)
                self.changed()

    def _run_across(
        self, crossing: Crossing, factor: torch.Tensor | None, average_share: float | None
    ) -> Iterator[None]:
        """The host updates. While the gradient is on its way to it, it updates the bucket before."""
        (gradient,), lent = self._scaled(factor)
        on_host = crossing.bring(gradient)
        try:
            yield
            with self._updates[0].at_hand():
                yield from self.renew(factor, average_share, on_host=on_host)
                self.changed()
        finally:  # also where another bucket's update has failed
            on_host()
            if lent is not None:
                self._pool.give_back(lent)

    def renew(
        self,
        factor: torch.Tensor | None,
        average_share: float | None = None,
        *,
        is_off: torch.Tensor | None = None,
        on_host: Callable[[], torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """As `run`, where all its needs are at hand; `changed` follows.

        Args:
            is_off: 0-dim fp32 on the device: 1 for a step that changes nothing, else 0; None for 0.
            on_host: waits for the gradient, scaled, to have come to the host, and gives it; None: it is the device's.
        """
        rest: Iterator[None] = iter(())
        first, lent = self._updates[0], None
        with named_range("optimizer", first.spec.name):
            for update in self._updates:
                update.take_writes()
            try:
                if first.is_compiled:
                    factor = number_on(first.device, 1.0 if factor is None else factor)
                    is_off = number_on(first.device, 0.0 if is_off is None else is_off)
                    for update in self._updates:
                        update.run_compiled(factor, is_off)
                else:
                    gradients, lent = self._scaled(factor) if on_host is None else ([on_host()], None)
                    self._step_spans(gradients, is_off)
                    if (whole := first.whole) is not None:
                        rest = whole.update(gradients[0], partial(self._step, first.whole_optimizer, is_off=is_off))
                        next(rest)  # it has read the gradient
            finally:
                if lent is not None:
                    self._pool.give_back(lent)
        yield from rest
        for update in self._updates:
            if average_share is not None:
                update.update_average(average_share)
            if not update.is_compiled:  # which renews the model weight in its pass
                update.refilled()

    def changed(self) -> None:
        """See `BucketUpdate.changed`."""
        for update in self._updates:
            update.changed()

    def _scaled(self, factor: torch.Tensor | None) -> tuple[list[torch.Tensor], Scratch | None]:
        """The reduced gradients times `factor`, and the buffer in which those are that have the master dtype apart."""
        lent = self._pool.take(self._lent_numel) if self._lent_numel else None
        gradients, start = [], 0
        for update in self._updates:
            stop = start + update.master_weight.numel()
            gradients.append(update.scaled(factor, None if lent is None else lent.storage[start:stop]))
            start = stop if update.has_copy else start
        return gradients, lent

    def _step_spans(self, gradients: Sequence[torch.Tensor], is_off: torch.Tensor | None) -> None:
        """Let the optimizer update the spans of all, with the state that each bucket's own keeps of them."""
        if (optimizer := self._optimizer) is None:
            return
        spans, kept = Updates(), list[tuple[dict[torch.Tensor, Any], torch.Tensor]]()
        for update, gradient in zip(self._updates, gradients, strict=True):
            spans += [(span.target, gradient[span.where]) for span in update.spans]
            if update.optimizer not in (None, optimizer):
                kept += [(update.optimizer.state, span.target) for span in update.spans]
        for state, target in kept:
            if target in state:
                optimizer.state[target] = state[target]
        try:
            self._step(optimizer, spans, is_off)
        finally:
            for state, target in kept:
                if target in optimizer.state:
                    state[target] = optimizer.state.pop(target)

    def _step(
        self, optimizer: torch.optim.Optimizer | None, updates: Updates, is_off: torch.Tensor | None = None
    ) -> None:
        if optimizer is None:
            return
        self._groups.show_hyperparameters(optimizer)
        untyped: Any = optimizer
        if is_off is not None:  # torch.amp.GradScaler turns a step off by these attributes
            untyped.grad_scale, untyped.found_inf = None, is_off
        try:
            with widened_state(optimizer, (target for target, _ in updates), self._groups.state_dtype):
                step_on_lent(optimizer, updates)
        finally:
            if is_off is not None:
                del untyped.grad_scale, untyped.found_inf


def join_updates(trained: Sequence[TrainedBucket]) -> list[JointUpdate]:
    """The updates of buckets, in their order, each of as many neighbours as one call of the optimizer may update. The
    same on all ranks.

    A bucket is alone that is updated in pauses: its tensors travel, or lie off the device.
    """
    numels = [bucket.update.master_weight.numel() for bucket in trained]
    least = 0 if any(bucket.update.has_copy for bucket in trained) else MIN_JOINT_NUMEL
    most = max(least, sum(numels) // JOINT_SHARE, max(numels, default=0))
    joined: list[list[TrainedBucket]] = []
    room = 0
    for bucket, numel in zip(trained, numels, strict=True):
        is_alone = bucket.update.is_away or bucket.update.whole is not None
        if is_alone or numel > room:
            joined.append([])
            room = most
        joined[-1].append(bucket)
        room = 0 if is_alone else room - numel
    return list(map(JointUpdate, joined))


def require_unchanged(spec: BucketSpec, *, trains: bool) -> None:
    """Refuse parameters told by others than the engine to train, or to train no more.

    Raises:
        EngineStateError: one was told so.
    """
    for index, parameter in enumerate(spec.tensors):
        if parameter.requires_grad is not trains:
            name, call = spec.parameters[index].names[0], "freeze" if trains else "unfreeze"
            raise EngineStateError(
                f"requires_grad of {name} was set to {not trains} after build_engine; call engine.{call}({name!r}) "
                "instead, on all ranks, between engine.step() and the next forward"
            )
