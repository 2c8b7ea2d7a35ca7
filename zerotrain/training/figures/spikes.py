"""Which steps stand out: a loss or a gradient far above those of the steps before it."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

NAMES = ("loss", "grad_norm")
NUM_BEFORE = 100
"""The steps that one is compared with."""
MIN_BEFORE = 20
"""Fewer steps say too little of how far a number varies by itself."""
MIN_SCORE = 10.0
"""Standard deviations above the median from which a number is a spike."""
MIN_SPREAD = 0.01
"""The least standard deviation, as a part of the median: what hardly varies is no spike for rising by a tenth."""
_QUARTILES_OF_A_NORMAL = 1.349
"""Standard deviations from the lower to the upper quartile."""


@dataclass(frozen=True)
class Spike:
    """A number of a step that stands out."""

    name: str
    value: float
    median: float
    """The median of the same number over the steps before it."""
    score: float
    """Standard deviations, told from the quartiles of the steps before it, by which it is above their median."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} stands out from the steps before it (median {self.median:.4g})"


class Before:
    """One number of the last `NUM_BEFORE` steps."""

    def __init__(self) -> None:
        self._in_turn: deque[float] = deque()
        self._sorted: list[float] = []

    def score(self, value: float) -> tuple[float, float]:
        """How far a value is above the median, in standard deviations, and the median; 0 of fewer than
        `MIN_BEFORE`. Quartiles are not moved by an outlier, and cost nothing where the numbers are sorted."""
        count = len(self._sorted)
        if count < MIN_BEFORE:
            return 0.0, value
        median = self._sorted[count // 2]
        quartiles = self._sorted[count * 3 // 4] - self._sorted[count // 4]
        spread = max(quartiles / _QUARTILES_OF_A_NORMAL, MIN_SPREAD * abs(median))
        return ((value - median) / spread if spread else 0.0), median

    def add(self, value: float) -> None:
        """Take the value of a further step."""
        if len(self._in_turn) == NUM_BEFORE:
            del self._sorted[bisect_left(self._sorted, self._in_turn.popleft())]
        self._in_turn.append(value)
        insort(self._sorted, value)


@dataclass
class Spikes:
    """Looks for them, step after step."""

    _before: Mapping[str, Before] = field(default_factory=lambda: {name: Before() for name in NAMES})

    def of(self, step: Mapping[str, Any]) -> Spike | None:
        """That of the next step, the larger of two. Numbers that are unknown or not finite are none: they have
        words of their own.

        Args:
            step: a line of steps.jsonl.
        """
        found = []
        for name, before in self._before.items():
            value = step.get(name)
            if isinstance(value, int | float) and isfinite(value):
                score, median = before.score(value)
                before.add(value)
                if score >= MIN_SCORE:
                    found.append(Spike(name, float(value), median, score))
        return max(found, key=lambda spike: spike.score, default=None)
