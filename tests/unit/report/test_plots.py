"""Places on a picture: round ticks within the range, outliers that widen nothing, and lines that stop at a nan."""

import math

import pytest

from zerotrain.report.plots import HEIGHT, WIDTH, Axis, axis_of, path_of


@pytest.mark.parametrize("low", [0.0, -3.0, 1.1234, 1e-6, 1e9])
@pytest.mark.parametrize("size", [1e-7, 0.3, 1.0, 7.77, 1e5])
def test_ticks_are_few_round_and_within(low: float, size: float):
    axis = Axis(low, low + size)
    ticks = axis.ticks
    assert 1 <= len(ticks) <= 11
    assert all(-1e-9 <= part <= 1 + 1e-9 for part, _ in ticks)


@pytest.mark.parametrize("values", [[], [3.0], [0.0, 0.0], [math.nan, math.inf], [1e17, 1e17], [-1e17, 1e17], [5e-324]])
def test_any_values_have_a_scale(values: list[float]):
    for axis in (axis_of(values), axis_of(values, from_zero=True), axis_of(values, usual=values)):
        assert axis.high > axis.low
        assert axis.ticks


def test_values_far_above_the_usual_ones_do_not_widen_a_scale():
    assert len(axis_of([-1.0, -3.0], from_zero=True).ticks) > 1  # of a damaged file
    assert axis_of([1.0, 2.0, 1000.0], usual=[1.0] * 5 + [2.0] * 5).high < 4
    assert axis_of([1.0, 2.0, 3.0], usual=[1.0, 2.0, 3.0]).high >= 3


def test_a_line_is_told_by_distances_and_stops_at_a_nan():
    x, y = Axis(0, 10), Axis(0, 4)
    points = [(0, 4.0), (5, 2.0), (5.001, 2.0), (6, math.nan), (10, 0.0), (10, 4.0)]
    half, end = WIDTH // 2, HEIGHT // 2
    assert path_of(points, x, y) == f"M0 0l{half} {end}M{WIDTH} {HEIGHT}l0-{HEIGHT}"


def test_a_value_far_outside_stays_near_the_picture():
    path = path_of([(0, 1e17), (1, -1e17)], Axis(0, 1), Axis(0, 1))
    assert path == f"M0 {-HEIGHT}l{WIDTH} {3 * HEIGHT}"
