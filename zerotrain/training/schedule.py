"""Learning rate schedules: functions of the step for a factor on the optimizer's learning rate.

All but `constant` rise linearly at first. The first step of the rise already moves the weights, and its last one has
the whole learning rate. Those that fall to `final_fraction` reach it in the last step of the run. Arguments of all:

    step: from 0 to `max_steps` - 1.
    max_steps: steps of the whole run.
    warmup_steps: steps of the rise; below 1 it is a part of all steps, such as 0.03.
    final_fraction: factor of the last step, between 0 and 1.

They raise ValueError where an argument is out of range.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""The forms of a fall: the remaining height by the completed part of the fall."""


def constant(step: int, max_steps: int) -> float:
    """The optimizer's own learning rate throughout."""
    return 1.0


def warmup_cosine(step: int, max_steps: int, *, warmup_steps: float = 20, final_fraction: float = 0.1) -> float:
    """Linear rise to 1, then a half cosine down to `final_fraction` (Loshchilov and Hutter, arXiv 1608.03983)."""
    return _rise_and_fall(step, max_steps, warmup_steps, final_fraction, FALLS["cosine"])


def warmup_linear(step: int, max_steps: int, *, warmup_steps: float = 20, final_fraction: float = 0.1) -> float:
    """Linear rise to 1, then a line down to `final_fraction` (Devlin et al., arXiv 1810.04805)."""
    return _rise_and_fall(step, max_steps, warmup_steps, final_fraction, FALLS["linear"])


def warmup_polynomial(
    step: int, max_steps: int, *, warmup_steps: float = 20, final_fraction: float = 0.1, power: float = 2.0
) -> float:
    """Linear rise to 1, then down to `final_fraction` by a power of the part of the fall that is left ("poly" policy
    of Liu et al., arXiv 1506.04579). With power 1 it is a line."""
    if not power > 0:
        raise ValueError(f"scheduler.power={power} is out of range; it must be above 0")
    return _rise_and_fall(step, max_steps, warmup_steps, final_fraction, lambda progress: (1 - progress) ** power)


def warmup_stable_decay(
    step: int,
    max_steps: int,
    *,
    warmup_steps: float = 20,
    decay_fraction: float = 0.2,
    decay: str = "linear",
    final_fraction: float = 0.1,
) -> float:
    """Linear rise to 1, then 1, and down to `final_fraction` in the last steps (WSD: Hu et al., arXiv 2404.06395).

    Args:
        decay_fraction: the fall as a part of all steps, between 0 and 1 (a fifth in Hägele et al., arXiv 2405.18392).
        decay: the form of the fall: linear, sqrt (1 - the root of the part that is done) or cosine.
    """
    if decay not in FALLS:
        raise ValueError(f"scheduler.decay={decay} is no form of a fall; it must be one of {', '.join(FALLS)}")
    _require_part("decay_fraction", decay_fraction)
    num_falling_steps = round(decay_fraction * max_steps)
    return _rise_and_fall(step, max_steps, warmup_steps, final_fraction, FALLS[decay], num_falling_steps)


def warmup_inverse_sqrt(step: int, max_steps: int, *, warmup_steps: float = 20) -> float:
    """Linear rise to 1, then down with the root of the steps, to 1/2 after four times the rise, wherever the run ends
    (Vaswani et al., arXiv 1706.03762, section 5.3)."""
    rise = _num_rising_steps(max_steps, warmup_steps)
    return min((step + 1) / max(1, rise), math.sqrt(max(1, rise) / (step + 1)))


def _rise_and_fall(
    step: int,
    max_steps: int,
    warmup_steps: float,
    final_fraction: float,
    height: Callable[[float], float],
    num_falling_steps: int | None = None,
) -> float:
    """Linear rise to 1, and a fall to `final_fraction` in the last steps, by default in all that are left."""
    _require_part("final_fraction", final_fraction)
    rise = _num_rising_steps(max_steps, warmup_steps)
    if step < rise:
        return (step + 1) / rise
    begin = rise if num_falling_steps is None else max(rise, max_steps - 1 - num_falling_steps)
    progress = min(1.0, max(0, step - begin) / max(1, max_steps - 1 - begin))
    return final_fraction + (1 - final_fraction) * height(progress)


def _num_rising_steps(max_steps: int, warmup_steps: float) -> int:
    if warmup_steps < 0:
        raise ValueError(f"scheduler.warmup_steps={warmup_steps} is negative; it must be at least 0")
    if warmup_steps < 1:
        return round(warmup_steps * max_steps)
    if warmup_steps % 1 != 0:
        raise ValueError(
            f"scheduler.warmup_steps={warmup_steps} is no number of steps; it must be whole, or below 1, a part of all"
        )
    return int(warmup_steps)


def _require_part(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"scheduler.{name}={value} is out of range; it must be between 0 and 1")


def set_rates(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Let the learning rate of each group be this part of what it began with."""
    for group in groups:
        group["lr"] = group["initial_lr"] * factor
