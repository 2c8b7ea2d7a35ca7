"""The value by which the jobs of a sweep are compared: a number of result.json, or a metric of the last evaluation."""

import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from zerotrain.files.untrusted import Natural, printable
from zerotrain.training.figures.result import RunResult

VAL_LOSS = "final_val_loss"
_OF_AN_EVALUATION = re.compile(r"val_\w+(/.+)?")
_NUMBERS = tuple(each.name for each in fields(RunResult) if each.type in (int, Natural, float | None))
NUMBERS = (
    *_NUMBERS,
    *(f"comm_bytes_per_step.{each}" for each in ("sent", "theory")),
    *(f"memory_bytes.{each}" for each in ("peak", "parameters", "gradients", "optimizer", "offloaded", "scratch")),
    *(f"memory_bytes.theory.{each}" for each in ("parameters", "gradients", "optimizer", "offloaded")),
)
"""Those of each result.json, by the names of objectives."""
_OBJECTS = tuple(each.name for each in fields(RunResult) if each.type in (dict[str, int] | None, dict[str, Any] | None))
_MAX_TOLD = 40


def in_evaluation(name: str) -> str | None:
    """The name of this value in an evaluation; None where none measures it."""
    if name == VAL_LOSS:
        return "val_loss"
    is_field = name in (each.name for each in fields(RunResult))
    return None if is_field or _OF_AN_EVALUATION.fullmatch(name) is None else name


def value_in(result: Mapping[str, Any], name: str) -> float | None:
    """The value in the body of a result.json; None where it is no number.

    Args:
        name: of a number there, with dots where that lies within an object, such as comm_bytes_per_step.sent; or of a
            metric of an evaluation, such as val_accuracy, or val_loss/NAME of a source or a further validation set.

    Raises:
        LookupError: there is no such value, and which there are.
    """
    known = _values(result)
    if name not in known:
        names = printable(", ".join(list(known)[:_MAX_TOLD]), keep="")
        raise LookupError(f"got {name}, which this job has not measured; it has {names}")
    return known[name]


def _values(result: Mapping[str, Any]) -> dict[str, float | None]:
    losses, metrics = result.get("val_loss_by_source"), result.get("val_metrics")
    found = {"val_loss": _number(result.get(VAL_LOSS))}
    found |= {f"val_loss/{name}": _number(value) for name, value in _items(losses)}
    found |= {str(name): _number(value) for name, value in _items(metrics)}
    found |= {name: _number(result.get(name)) for name in _NUMBERS}
    for name in _OBJECTS:
        for key, value in _items(result.get(name)):
            inner = {f"{name}.{key}.{each}": _number(item) for each, item in _items(value)}
            found |= inner if isinstance(value, dict) else {f"{name}.{key}": _number(value)}
    return found


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_one else None
