"""Parallel coordinates: a line for each job through its settings to its loss, and what each setting explains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerotrain.report.groups import explained, is_number, sorted_values
from zerotrain.report.page.markup import Markup, hidden, tag
from zerotrain.report.page.scale import HEIGHT, WIDTH, percent, scale_of
from zerotrain.report.rows import Report, Row, short_names, value_text
from zerotrain.report.values import in_short

MIN_JOBS = 20
MAX_AXES = 8
MOST_VALUES = 10
"""Values of a setting that are each told beside its axis, at equal distances."""
BEST_PART = 10
"""One of so many jobs is among the best."""


@dataclass(frozen=True)
class Axis:
    """A setting, or the loss, from the bottom of the picture to its top."""

    name: str
    about: str
    places: dict[str, float]
    """Value, as `repr` writes it -> its place, 0 at the bottom."""
    ticks: list[tuple[float, str]]


def parallel_section(report: Report) -> Markup:
    """The section of the page; empty for fewer jobs than `MIN_JOBS`, or where no setting differs."""
    rows = report.ranked
    names = [name for name in report.settings if len({repr(row.settings.get(name)) for row in rows}) > 1]
    if len(rows) < MIN_JOBS or not names:
        return Markup()
    parts = {name: explained(report, name) for name in names}
    names = sorted(names, key=lambda name: -(parts[name] or 0.0))[:MAX_AXES]
    short = short_names(report.settings)
    axes = [_axis_of(name, short[name], [row.settings.get(name) for row in rows], parts[name]) for name in names]
    values = [float(row[report.loss] or 0.0) for row in rows]
    losses = scale_of(values, usual=values)
    ticks = [(losses.part(tick), in_short(tick)) for tick in losses.ticks()]
    axes.append(Axis(report.loss_name, "high is best" if report.rises else "low is best", {}, ticks))
    best = rows[: max(1, len(rows) // BEST_PART)]
    lines = []
    for row in reversed(rows):
        heights = [axis.places[repr(row.settings.get(name))] for axis, name in zip(axes[:-1], names, strict=True)]
        heights.append(min(1.0, losses.part(float(row[report.loss] or 0.0))))
        lines.append(_line(row, heights, report, "best" if row in best else "other"))
    words = f"{len(rows)} jobs, each a line through {', '.join(axis.name for axis in axes)}."
    bars = "".join(f"M{round(WIDTH * place / (len(axes) - 1))} 0v{HEIGHT}" for place in range(len(axes)))
    picture = tag(
        "svg",
        tag("path", class_="grid", d=bars),
        *lines,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )
    heads = [_words(axis, place / (len(axes) - 1)) for place, axis in enumerate(axes)]
    figure = tag("div", tag("div", *heads, class_="heads"), tag("div", picture, class_="picture"), class_="frame")
    region = tag("div", figure, class_="scroll", tabindex="0", role="region", aria_label="Settings and loss")
    note = (
        f"The best {len(best)} of {len(rows)} completed jobs have the colour. A percentage is the part of the variance "
        "of the loss that the setting alone explains among these jobs; it says nothing of settings together."
    )
    style = f"--axes:{len(axes)}"
    body = tag("figure", region, tag("figcaption", note), class_="parallel", style=style)
    return tag("section", tag("h2", "Settings and loss"), body, id="parallel")


def _axis_of(name: str, short: str, values: Sequence[Any], part: float | None) -> Axis:
    about = "" if part is None else f"explains {part:.0%}"
    different = sorted_values(list(values))
    if len(different) > MOST_VALUES and all(map(is_number, different)):
        low, high = float(different[0]), float(different[-1])
        bends = math.log if low > 0 and high / low > 50 else float
        scale = scale_of(bends(each) for each in different)
        places = {repr(each): scale.part(bends(each)) for each in different}
        ends = (different[0], different[len(different) // 2], different[-1])
        return Axis(short, about, places, [(places[repr(each)], in_short(each)) for each in ends])
    steps = max(1, len(different) - 1)
    places = {repr(each): (place + 0.5 * (len(different) == 1)) / steps for place, each in enumerate(different)}
    told = different if len(different) <= MOST_VALUES else [different[0], different[-1]]
    return Axis(short, about, places, [(places[repr(each)], value_text(name, each)) for each in told])


def _line(row: Row, heights: Sequence[float], report: Report, style: str) -> Markup:
    places = [
        f"{round(WIDTH * place / (len(heights) - 1))} {round(HEIGHT * (1 - height))}"
        for place, height in enumerate(heights)
    ]
    words = tag("title", f"job {row.job}: {row[report.loss]:.4f}")
    return tag("path", words, class_=style, d=f"M{'L'.join(places)}", data_j=report.rows.index(row))


def _words(axis: Axis, place: float) -> Markup:
    ticks = [tag("span", words, style=f"top:{percent(1 - part)}") for part, words in axis.ticks]
    about = tag("small", axis.about) if axis.about else ""
    name = tag("b", axis.name, hidden(": ") if about else "", about)
    return tag("div", name, tag("div", *ticks, class_="ticks"), style=f"left:{percent(place)}")
