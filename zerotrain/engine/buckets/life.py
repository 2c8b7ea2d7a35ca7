"""The states of a bucket's weights and gradient, and the transitions allowed between them."""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from zerotrain.errors import EngineStateError


class _State(Enum):
    """Looked up in sets at each transition: a member is hashed as the one object it is, not by a call into Python."""

    __hash__ = object.__hash__


class WeightState(_State):
    """How much of a bucket's model weight is up to date on this rank."""

    SHARD = "shard"
    """Only this rank's range."""
    GATHERING = "gathering"
    """An all-gather into the full weight is under way."""
    FULL = "full"
    """All of it: the model may read it."""


class GradientState(_State):
    """How far a bucket's gradient of this step has come."""

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
    RECOMPUTATION = "recomputation"
    """A call of the engine within a backward, as of a checkpoint around one: what it gathers stays full for that."""
    UPDATE = "update"


WEIGHT_TRANSITIONS = {
    (WeightState.SHARD, WeightState.GATHERING),
    (WeightState.GATHERING, WeightState.FULL),
    (WeightState.FULL, WeightState.SHARD),
}
GRADIENT_TRANSITIONS = {
    (GradientState.EMPTY, GradientState.FILLING),
    (GradientState.FILLING, GradientState.REDUCING),
    (GradientState.REDUCING, GradientState.REDUCED),
    (GradientState.REDUCED, GradientState.FILLING),  # a second backward before the step adds to the first
    (GradientState.REDUCED, GradientState.EMPTY),
    (GradientState.FILLING, GradientState.EMPTY),  # dropped without a step
    (GradientState.EMPTY, GradientState.REDUCED),  # by a graph, which fills and reduces in one
}

S = TypeVar("S", bound=Enum)


class Life(Generic[S]):
    """A state, changing along written transitions only."""

    def __init__(self, owner: str, state: S, transitions: set[tuple[S, S]]) -> None:
        self.owner = owner
        self.state = state
        self._transitions = transitions

    def become(self, state: S) -> None:
        """Change state; EngineStateError if the transition is not one of the written ones."""
        if (self.state, state) not in self._transitions:
            raise EngineStateError(f"{self.owner}: cannot go from {self.state.value} to {state.value}")
        self.state = state


# Facts about a backward, known before it begins.


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
    """False for a loss that weighs nothing: zeros are moved in place of its gradients; they may be nan."""
    frees_graph: bool = True
    """No other backward can come through the same graph."""
    loss_scale: float = 1.0
    """Factor of the loss."""
    discards: bool = False
    """Gradients are not reduced but discarded where they would be: a leaf is computed again for its digest."""
