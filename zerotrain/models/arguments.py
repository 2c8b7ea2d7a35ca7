"""Errors of models about wrong arguments: one sentence with the field, its value and the allowed ones."""

from typing import Any


def require_at_least(minimum: int, **arguments: int) -> None:
    """Check that each argument is a whole number of at least `minimum`; a ValueError names the first that is not."""
    for name, value in arguments.items():
        if not isinstance(value, int):
            raise ValueError(f"model.{name}={value} is no whole number; it must be one, at least {minimum}")
        if value < minimum:
            raise ValueError(f"model.{name}={value} is too small; it must be at least {minimum}")


def require_fraction(**arguments: float) -> None:
    """Check that each argument is in [0, 1); a ValueError names the first that is not."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"model.{name}={value} is out of range; it must be at least 0 and below 1")


def require_names(**arguments: Any) -> None:
    """Check that each argument is a list of names or patterns; a ValueError names the first that is not. A string
    would be taken for a list of its letters."""
    for name, value in arguments.items():
        if isinstance(value, str) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"model.{name}={value} is no list of names; give one such as model.{name}=[{value}]")
