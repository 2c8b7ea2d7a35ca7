"""Groups of jobs that have something in common: equal weights, settings that differ in the seed alone, and effects of
a setting."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.report.rows import Report, Row

NUM_BINS = 4
"""Parts of equal counts into which the values of a setting are divided, where it has more."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The losses of jobs that differ in `seed` alone."""

    rows: list[Row]
    mean: float
    deviation: float
    """The standard deviation of the sample."""
    least: float
    most: float


def equal_weights(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The jobs by the sha256 of their weights, the largest group first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.weights_sha256:
            found.setdefault(row.weights_sha256, []).append(row)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def spreads(report: Report) -> list[Spread]:
    """The spread over seeds, of each group of two jobs or more, the best mean first."""
    groups: dict[str, list[Row]] = {}
    for row in report.ranked:
        if row.but_for_seed is not None:
            groups.setdefault(row.but_for_seed, []).append(row)
    found = []
    for rows in groups.values():
        losses = [float(row[report.loss] or 0.0) for row in rows]
        if len({row.settings.get("seed") for row in rows}) > 1:
            mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
            found.append(Spread(rows=rows, mean=mean, deviation=deviation, least=min(losses), most=max(losses)))
    return sorted(found, key=lambda each: each.mean)


def explained(report: Report, name: str) -> float | None:
    """The part of the variance of the loss, 0 to 1, that one setting alone explains: the correlation ratio over at most
    `NUM_BINS` bins of its values, corrected for their number (epsilon squared, Kelley 1935). None where the completed
    jobs are too few, or all have one loss or one value."""
    pairs = [(row.settings[name], float(row[report.loss] or 0.0)) for row in report.ranked if name in row.settings]
    losses = [loss for _, loss in pairs]
    bins = _bins([value for value, _ in pairs])
    num, num_bins = len(pairs), len(set(bins))
    if num - num_bins < NUM_BINS or num_bins < 2:
        return None
    total = statistics.pvariance(losses) * num
    within = 0.0
    for each in set(bins):
        own = [loss for loss, bin_ in zip(losses, bins, strict=True) if bin_ == each]
        within += statistics.pvariance(own) * len(own)
    if not total > 0 or not math.isfinite(total):
        return None
    return max(0.0, 1 - within / total * (num - 1) / (num - num_bins))


def _bins(values: list[Any]) -> list[int]:
    """The number of each value's bin."""
    different = sorted_values(values)
    places = {repr(value): place for place, value in enumerate(different)}
    if len(different) <= NUM_BINS:
        return [places[repr(value)] for value in values]
    order = sorted(range(len(values)), key=lambda index: places[repr(values[index])])
    bins: dict[str, int] = {}
    for rank, index in enumerate(order):
        bins.setdefault(repr(values[index]), rank * NUM_BINS // len(values))
    return [bins[repr(value)] for value in values]


def sorted_values(values: list[Any]) -> list[Any]:
    """The different values: numbers by size, then all else by its text."""
    different = {repr(value): value for value in values}.values()
    return sorted(different, key=lambda value: (not is_number(value), value if is_number(value) else 0, repr(value)))


def is_number(value: Any) -> bool:
    """Whether a setting's value is a number, and not true or false."""
    return type(value) in (int, float)
