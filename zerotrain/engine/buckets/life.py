"""The states of a bucket's weights and gradient, in the order in which they follow each other."""

from dataclasses import dataclass
from enum import Enum


class WeightState(Enum):
    """How much of a bucket's model weight is up to date on this rank."""

    SHARD = "shard"
    """Only this rank's range."""
    GATHERING = "gathering"
    """An all-gather into the full weight is under way."""
    FULL = "full"
    """All of it: the model may read it."""


class GradientState(Enum):
    """How far a bucket's gradient of this step has come. A second backward before the step fills what was reduced, and
    a step that is given up empties whatever there is."""

    EMPTY = "empty"
    FILLING = "filling"
    """Unreduced: holds the gradients of one or more micro-batches of this rank."""
    REDUCING = "reducing"
    """A reduce-scatter is under way."""
    REDUCED = "reduced"
    """The shard holds the sum over ranks."""


class Phase(Enum):
    """The engine's current activity."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


# Facts about a backward that are known before it begins.


@dataclass(frozen=True)
class Backward:
    """One of the backwards of a step, on this rank."""

    reduces: bool = True
    """Gradients are reduced while they arrive; otherwise they are added up on this rank."""
    completes: bool = True
    """After it the step's gradient is complete, as far as the caller has said."""
    in_last_leaf: bool = True
    """No further virtual rank of this rank follows. See [Note: leaves] in `gradient.py`."""
    counts: bool = True
    """False for a loss that weighs nothing: zeros are moved in place of its gradients, which may be nan."""
    frees_graph: bool = True
    """No other backward can come through the same graph."""
    loss_scale: float = 1.0
    """Factor of the loss."""
