"""Learning rate schedules: functions of the step that return a factor on the optimizer's learning rate."""

import math
from collections.abc import Iterable
from typing import Any


def constant(step: int, max_steps: int) -> float:
    """The optimizer's own learning rate throughout."""
    return 1.0


def warmup_cosine(step: int, max_steps: int, *, warmup_steps: int = 20, final_fraction: float = 0.1) -> float:
    """Linear rise to 1, then a half cosine down to `final_fraction`, reached in the last step (arXiv 1608.03983).

    Args:
        step: from 0 to `max_steps` - 1.
        max_steps: steps of the whole run.
        warmup_steps: steps of the rise; the first one already moves the weights.
        final_fraction: factor of the last step, between 0 and 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if warmup_steps < 0:
        raise ValueError(f"scheduler.warmup_steps={warmup_steps} is negative; it must be at least 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"scheduler.final_fraction={final_fraction} is out of range; it must be between 0 and 1")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    num_falling_steps = max(1, max_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / num_falling_steps)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Let the learning rate of each group be this part of what it began with."""
    for group in groups:
        group["lr"] = group["initial_lr"] * factor
