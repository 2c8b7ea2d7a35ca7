"""Parts of a bucket whose gradients are moved into it together."""

from dataclasses import dataclass

import torch

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
