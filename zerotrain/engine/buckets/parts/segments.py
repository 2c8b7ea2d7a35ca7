"""Parts of a bucket whose gradients are moved into it together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotrain.engine.model.live_parameter import get_grad, set_grad
from zerotrain.sharding.bucketing import BucketSpec

SEGMENT_NBYTES = 2**18
"""Gradients are moved into the bucket in steps of at least this much: small ones together, a large one alone and
while it is still in the cache."""


@dataclass(eq=False)
class Segment:
    """Neighbouring parameters of a bucket whose gradients are moved together."""

    slots: range
    parameters: list[torch.nn.Parameter]
    holds_values: bool = False
    """Whether this step's buffer already holds gradients of this segment, so that further ones are added."""

    def move_into(self, views: Sequence[torch.Tensor], *, counts: bool) -> None:
        """Move the parameters' gradients into a buffer, of which `views` has one for each slot, or add them to what it
        holds. A parameter without a gradient counts as zeros, and so do all of them where they do not count."""
        present = [
            (views[slot], get_grad(p) if counts else None) for slot, p in zip(self.slots, self.parameters, strict=True)
        ]
        targets = [target for target, grad in present if grad is not None]
        grads = [grad for _, grad in present if grad is not None]
        if self.holds_values:
            if grads:
                torch._foreach_add_(targets, grads)
        else:
            if len(grads) < len(present):
                torch._foreach_zero_([target for target, grad in present if grad is None])
            if grads:
                torch._foreach_copy_(targets, grads)
            self.holds_values = True
        self.forget()

    def forget(self) -> None:
        """Take the gradients from the parameters."""
        for parameter in self.parameters:
            set_grad(parameter, None)


def cut_segments(spec: BucketSpec) -> list[Segment]:
    """All parameters of a bucket, in order."""
    segments: list[Segment] = []
    start = nbytes = 0
    parameters = [managed.parameter for managed in spec.parameters]
    for index, parameter in enumerate(parameters):
        nbytes += parameter.nbytes
        if nbytes >= SEGMENT_NBYTES or index == len(parameters) - 1:
            segments.append(Segment(range(start, index + 1), parameters[start : index + 1]))
            start, nbytes = index + 1, 0
    return segments
