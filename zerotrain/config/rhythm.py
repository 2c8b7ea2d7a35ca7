"""How often something is done in a run: after so many steps, tokens, epochs or seconds."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerotrain.settings import Rule

_UNITS = {"s": ("seconds", 1), "m": ("seconds", 60), "h": ("seconds", 3600)}
_FORM = re.compile(
    r"(?P<count>[1-9]\d{0,8})(?P<time>[smh]?)|(?P<amount>\d{1,15}(\.\d{1,15})?(e\d{1,2})?) ?(?P<of>epoch|token)s?"
)


@dataclass(frozen=True)
class Rhythm:
    """A distance between two times at which the same is done."""

    number: Fraction
    unit: str
    """steps, seconds, tokens or epochs."""

    @classmethod
    def read(cls, given: Any) -> "Rhythm | None":
        """The rhythm that a setting has: 100, "15m", "0.1epoch" or "5e6tokens". None where it is none."""
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return cls(Fraction(given), "steps")
        found = _FORM.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            return None
        if found["of"]:
            amount = Fraction(found["amount"])
            return cls(amount, f"{found['of']}s") if amount else None
        unit, factor = _UNITS.get(found["time"], ("steps", 1))
        return cls(Fraction(found["count"]) * factor, unit)


def rhythm_rule(*, times: bool = False, others: str = "", allows: Callable[[Any], bool] = lambda _: False) -> Rule:
    """A rhythm, or something else.

    Args:
        times: whether a time is one too.
        others, allows: the other values.
    """
    forms = "a number of steps such as 100, of tokens such as 5e6tokens or of epochs such as 0.1epoch"
    forms += ", a time such as 600s, 15m or 2h" if times else ""

    def holds(value: Any) -> bool:
        rhythm = Rhythm.read(value)
        return allows(value) or (rhythm is not None and (times or rhythm.unit != "seconds"))

    return Rule(f"{forms}{others}", holds)
