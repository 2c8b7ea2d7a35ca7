"""From numbers to places on a picture: round ticks, and a range that a few outliers do not widen."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WIDTH, HEIGHT = 1000, 400
"""Units of a picture, which a browser stretches to the room that there is."""
NUM_TICKS = 5
LEAST = 1e-200
"""The least range, below which floats have no digits left."""
CUT = 2.2
"""Ranges from the least value to the ninth of ten, beyond which outliers are cut off."""


@dataclass(frozen=True)
class Scale:
    """A range of numbers along one side of a picture."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """The place of a number, 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """About five round numbers within the range."""
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.9)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * place for place in range(first, min(last, first + 2 * NUM_TICKS) + 1)]


def scale_of(values: Iterable[float], *, from_zero: bool = False, usual: Iterable[float] = ()) -> Scale:
    """The scale on which all finite values lie.

    Args:
        from_zero: whether 0 is its low end.
        usual: values that count; what lies far above nine of ten of them is left out.
    """
    known = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low, high = 0.0 if from_zero else known[0], known[-1]
    counted = sorted(value for value in usual if math.isfinite(value))
    if counted and (ninth := counted[math.ceil(0.9 * (len(counted) - 1))]) > low:
        high = min(high, low + CUT * (ninth - low))
    if not high - low > max(1e-9 * max(abs(high), abs(low)), LEAST):
        room = abs(high) / 2 if abs(high) > LEAST else 0.5
        return Scale(low, high + room) if from_zero else Scale(low - room, high + room)
    room = 0.0 if from_zero else 0.04 * (high - low)
    return Scale(low - room, high + room)


def percent(part: float) -> str:
    """A place as css has it."""
    return f"{100 * part:.4g}%"


def path_of(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    """The line through points, interrupted where one is not finite. Numbers are whole, and each is told by its
    distance from the one before: a page has thousands."""
    parts, before = [], None
    for value, height in points:
        if not math.isfinite(value) or not math.isfinite(height):
            before = None
            continue
        top = max(-1.0, min(2.0, y.part(height)))
        place = round(WIDTH * x.part(value)), round(HEIGHT * (1 - top))
        if before is None:
            parts.append(f"M{place[0]} {place[1]}")
        elif place != before:
            across, down = place[0] - before[0], place[1] - before[1]
            parts.append(f"l{across} {down}" if down >= 0 else f"l{across}{down}")
        before = place
    return "".join(parts)
