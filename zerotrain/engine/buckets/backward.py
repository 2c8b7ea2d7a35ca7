"""Facts about a backward that are known before it begins."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backward:
    """One of the backwards of a step, on this rank."""

    reduces: bool = True
    """Gradients are reduced while they arrive; otherwise they are added up on this rank."""
    completes: bool = True
    """After it the step's gradient is complete, as far as the caller has said."""
    in_last_leaf: bool = True
    """No further virtual rank of this rank follows. See [Note: leaves] in `subtrees`."""
    counts: bool = True
    """False for a loss that weighs nothing: zeros are moved in place of its gradients, which may be nan."""
    frees_graph: bool = True
    """No other backward can come through the same graph."""
    loss_scale: float = 1.0
    """Factor of the loss."""
