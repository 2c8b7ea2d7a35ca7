"""What models say about wrong arguments: one sentence with the field, what it got and what is allowed."""


def require_at_least(minimum: int, **arguments: int) -> None:
    """Check that each argument is at least `minimum`.

    Raises:
        ValueError: naming the first `model.` field that is smaller.
    """
    for name, value in arguments.items():
        if value < minimum:
            raise ValueError(f"model.{name}={value} is too small; it must be at least {minimum}")


def require_fraction(**arguments: float) -> None:
    """Check that each argument is in [0, 1).

    Raises:
        ValueError: naming the first `model.` field that is outside.
    """
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"model.{name}={value} is out of range; it must be at least 0 and below 1")
