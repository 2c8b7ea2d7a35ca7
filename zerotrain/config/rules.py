"""Rules for settings that are more than a number or a word: rhythms, schedules of stages, patterns of names, lists."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerotrain.settings import STAGE, Rule

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


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_schedule(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and bool(value) and all(_is_entry(*each) for each in value.items())
    )


def _is_entry(step: Any, number: Any) -> bool:
    """A step may be a text: JSON and `+zero.schedule.500=3` have no other."""
    is_step = (isinstance(step, int) and not isinstance(step, bool)) or (isinstance(step, str) and step.isdecimal())
    return is_step and int(step) >= 0 and STAGE.holds(number)


def _is_match(value: Any) -> bool:
    patterns = value if isinstance(value, list) else [value]
    return bool(patterns) and all(isinstance(each, str) and each for each in patterns)


def _is_frozen(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return isinstance(entry, str) and bool(entry)
    rhythm = Rhythm.read(entry.get("until", 1))
    is_until = rhythm is not None and rhythm.unit != "seconds"
    return entry.keys() <= {"match", "until"} and _is_match(entry.get("match")) and is_until


def _is_group(name: Any, entry: Any) -> bool:
    if entry is None:
        return True
    if not isinstance(name, str) or not isinstance(entry, dict) or not {"params", "name"}.isdisjoint(entry):
        return False
    numbers = [value for value in entry.values() if isinstance(value, float)]
    return len(entry) > 1 and _is_match(entry.get("match")) and all(map(math.isfinite, numbers))


BEST_OF = Rule(
    "val_loss, val_NAME of a metric, or with /NAME that of a source of data=mix or of one of data.validation_sets",
    lambda value: re.fullmatch(r"val_\w+(/.+)?", value) is not None,
)
INTERFACE = Rule(
    "auto, or the name of a network interface, such as eth0",
    lambda name: isinstance(name, str) and re.fullmatch(r"[\w.@:-]{1,15}", name) is not None,
)
COLLATE = Rule(
    "null, or a function such as {_target_: my_components.pad, _partial_: true}",
    lambda value: value is None or (isinstance(value, dict) and isinstance(value.get("_target_"), str)),
)
VALIDATION_SETS = Rule(
    "null, or data by names of letters, digits, _ and -, such as {docs: {path: docs}}",
    lambda value: (
        value is None
        or (
            isinstance(value, dict)
            and all(re.fullmatch(r"[\w-]+", str(key)) and isinstance(value[key], dict) for key in value)
        )
    ),
)
PROMPTS = Rule(
    "a list of texts such as ['def main','class A'], or null",
    lambda value: value is None or (isinstance(value, list) and bool(value) and all(map(_is_prompt, value))),
)
EVAL_BATCHES = Rule("1 or more batches, or all", lambda value: value == "all" or (type(value) is int and value >= 1))
SCHEDULE = Rule(
    "steps done and the stage (0 to 3) from there on, such as {0: 2, 500: 3}, or null for zero.stage in all steps",
    _is_schedule,
)
FREEZE = Rule(
    "a list of name patterns such as [*.wte.*] and of entries such as {match: blocks.0.*, until: 100} (steps, "
    "5e6tokens or 0.1epoch), or null",
    lambda value: value is None or (isinstance(value, list) and all(map(_is_frozen, value))),
)
GROUPS = Rule(
    "names, each with patterns and what differs, such as {head: {match: lm_head.*, lr: 1e-4}}, or null",
    lambda value: value is None or (isinstance(value, dict) and all(_is_group(*each) for each in value.items())),
)


def listed(value: Any) -> list[Any]:
    """A list as it is, and one of a value alone."""
    return value if isinstance(value, list) else [value]


OBJECTIVE = Rule(
    "a number of result.json or a metric of an evaluation, such as val_accuracy, or a list of them",
    lambda value: bool(listed(value)) and all(isinstance(each, str) and each for each in listed(value)),
)
DIRECTION = Rule(
    "minimize or maximize, or a list with one for each objective",
    lambda value: bool(listed(value)) and all(each in ("minimize", "maximize") for each in listed(value)),
)
PRUNER = Rule(
    "a class of optuna.pruners with its arguments, {_target_: ..., argument: ...}",
    lambda value: isinstance(value, dict) and isinstance(value.get("_target_"), str),
)
EVAL_EVERY = rhythm_rule(others=", or 0 for only the last", allows=lambda value: type(value) is int and value == 0)
WEIGHTS = Rule("a file with weights, a folder of Hugging Face or torch's DCP, a checkpoint", bool)
EVERY = rhythm_rule(times=True, others=", or null for never", allows=lambda value: value is None)
