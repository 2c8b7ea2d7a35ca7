"""A unit at run time: its modules, its buckets and those to gather ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


def require_unchanged(members: Iterable[ManagedParameter], *, trains: bool) -> None:
    """Make sure that nobody but the engine has told these parameters to train, or to train no more.

    Raises:
        EngineStateError: one was told so.
    """
    for managed in members:
        if managed.parameter.requires_grad is not trains:
            name, call = managed.names[0], "freeze" if trains else "unfreeze"
            raise EngineStateError(
                f"requires_grad of {name} was set to {not trains} after build_engine; call engine.{call}({name!r}) "
                "instead, on all ranks, between engine.step() and the next forward"
            )
