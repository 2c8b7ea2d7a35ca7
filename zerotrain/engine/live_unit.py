"""A unit at run time: its modules, its buckets and those to gather ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch import nn

from zerotrain.engine.gradients import BucketGradient
from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import ManagedParameter


@dataclass(eq=False)
class Bucket:
    """One bucket at run time. A frozen bucket has no gradient."""

    weights: BucketWeights
    gradient: BucketGradient | None
    stays_full: bool = False
    """Kept from the forward to the backward: the head of the root, the last unit of the forward, and what is read
    without a hook that announces it."""
    awaits_backward: bool = False
    """A forward since the last step left it full for its backward, which may find it freed by other calls between."""


@dataclass(eq=False)
class LiveUnit:
    """A unit with the buckets it needs and those to gather ahead while it runs."""

    name: str
    modules: list[nn.Module]
    buckets: list[Bucket]
    ahead_in_forward: list[Bucket] = field(default_factory=list)
    ahead_in_backward: list[Bucket] = field(default_factory=list)
    last_of: list[Bucket] = field(default_factory=list)
    """Buckets that no later unit of the forward needs."""
    calls_units: bool = False
    """Whether other units run within its forward, and so within its backward."""


def next_buckets(unit: LiveUnit, following: Sequence[LiveUnit], prefetch: int) -> list[Bucket]:
    """The buckets of the next `prefetch` units that need any which `unit` does not have."""
    ahead: list[Bucket] = []
    for other in following:
        new = [bucket for bucket in other.buckets if bucket not in unit.buckets and bucket not in ahead]
        if new and prefetch > 0:
            ahead += new
            prefetch -= 1
    return ahead


class FrozenParameters:
    """The parameters without a gradient, which nobody may tell to train but the engine.

    Looked at in every backward, so it costs one C call for each of them.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._managed = [m for bucket in buckets if bucket.gradient is None for m in bucket.weights.spec.parameters]
        self._parameters = [managed.parameter for managed in self._managed]

    def require_frozen(self) -> None:
        """Make sure that they are still frozen.

        Raises:
            EngineStateError: one is not.
        """
        if any(map(_requires_grad, self._parameters)):
            raise _changed_unseen(next(m for m in self._managed if m.parameter.requires_grad), "unfreeze")


def require_still_trained(gradient: BucketGradient) -> None:
    """Make sure that no parameter of a bucket, of which gradients are missing, was frozen.

    Raises:
        EngineStateError: one was.
    """
    for managed in gradient.spec.parameters:
        if not managed.parameter.requires_grad:
            raise _changed_unseen(managed, "freeze")


_requires_grad = attrgetter("requires_grad")


def _changed_unseen(managed: ManagedParameter, call: str) -> EngineStateError:
    name = managed.names[0]
    return EngineStateError(
        f"requires_grad of {name} was set to {managed.parameter.requires_grad} after build_engine; call "
        f"engine.{call}({name!r}) instead, on all ranks, between engine.step() and the next forward"
    )
