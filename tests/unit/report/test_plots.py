"""Places on a picture: round ticks within the range, outliers that widen nothing, and lines that stop at a nan."""

import math

from zerotrain.report.plots import HEIGHT, WIDTH, Axis, axis_of, path_of


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
