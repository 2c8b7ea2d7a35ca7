"""Dynamic loss scaling: keeps the gradients of fp16 between its underflow and its overflow.

fp16 has no numbers between 0 and 6e-8. The loss is multiplied by a scale before the backward, and the gradient divided
by it in fp32 before the update (Micikevicius et al. 2018, "Mixed precision training", arXiv 1710.03740, section 3.2).
Every scale is a power of two, which moves exponents and no other bits.
"""

from typing import Any

MAX_SCALE = 2.0**32
"""Reached only where gradients vanish: then no scale is too large, and the scale must not leave fp32 itself."""


class LossScaler:
    """The scale of one run: halved by each overflow, doubled after `growth_interval` steps in a row without one.

    All ranks call `update` with the same values, so all have the same scale.

    Args:
        initial_scale: a power of two, from 1 to `MAX_SCALE`.
    """

    scale: float
    """Factor of the loss in the next backward."""

    def __init__(self, *, initial_scale: float, growth_interval: int) -> None:
        self.scale = initial_scale
        self.growth_interval = growth_interval
        self._num_clean_steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether an overflow now is one that no smaller scale can end."""
        return self.scale <= 1.0

    def update(self, *, overflowed: bool) -> None:
        """One step is over; `overflowed` says whether its gradient was not finite."""
        if overflowed:
            self.scale = max(self.scale / 2, 1.0)
            self._num_clean_steps = 0
            return
        self._num_clean_steps += 1
        if self._num_clean_steps == self.growth_interval:
            self.scale = min(self.scale * 2, MAX_SCALE)
            self._num_clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run goes on with the same scales."""
        return {"scale": self.scale, "num_clean_steps": self._num_clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the run that gave `state` was."""
        self.scale = state["scale"]
        self._num_clean_steps = state["num_clean_steps"]
