"""The worst step of a record: not finite, then a spike, then a large gradient."""

from typing import Any

from zerotrain.replay.record import Record


def record_of(steps: int, **other: dict[str, Any]) -> Record:
    """Losses and norms that fall and vary a little, and other lines of some steps, such as `step_7`."""
    lines = {step: {"loss": 5 - step / 100 + step % 3 / 50, "grad_norm": 9 - step / 50} for step in range(1, steps + 1)}
    return Record(lines | {int(name.removeprefix("step_")): line for name, line in other.items()})


def test_the_first_step_that_is_not_finite_comes_before_any_spike() -> None:
    bad = {"loss": 1.0, "grad_norm": None}
    assert record_of(90, step_40={"loss": 50.0, "grad_norm": 1.0}, step_60=bad, step_70=bad).worst == 60


def test_the_largest_spike_comes_before_the_large_gradients_of_the_beginning() -> None:
    small, large = {"loss": 8.0, "grad_norm": 2.0}, {"loss": 9.0, "grad_norm": 2.0}
    assert record_of(90, step_1={"loss": 5.0, "grad_norm": 1e6}, step_60=large, step_70=small).worst == 60
    assert record_of(90, step_1={"loss": 5.0, "grad_norm": 1e6}, step_60=small, step_70=large).worst == 70


def test_without_a_spike_it_is_that_of_the_largest_gradient() -> None:
    assert record_of(90).worst == 1
    assert record_of(15, step_12={"loss": 90.0, "grad_norm": 91.0}).worst == 12, "too early to be a spike"
