"""The losses over steps, tokens and time: a picture for each, of which the page shows one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.report.curves import AXES, Curve
from zerotrain.report.page.markup import Markup, joined, names_of, tag
from zerotrain.report.page.scale import HEIGHT, WIDTH, Scale, path_of, percent, scale_of
from zerotrain.report.rows import Report, Row
from zerotrain.report.values import in_short, shortened

NUM_COLOURS = 8
"""Jobs that each have a colour and a label; of more the best alone stands out."""
MAX_PLOT_POINTS = 12_000
"""Points of all curves of a picture."""
MIN_POINTS, MOST_POINTS = 40, 200
LABEL_ROOM = 0.075
"""Part of a picture's height that a label takes."""
NAMES = {"step": "steps", "tokens": "tokens", "train_s": "seconds of training"}
SHORT_NAMES = {"step": "steps", "tokens": "tokens", "train_s": "time"}
KINDS = {"val": "validation loss", "train": "training loss"}
MAX_LABEL = 34
FIRST_PART = 0.25
"""Part of a picture in which losses fall from high above; the scale is made for what comes after it."""
MIN_CUT_POINTS = 5


@dataclass(frozen=True)
class _CurveLine:
    """Equal curves of one or more jobs."""

    rows: list[Row]
    place: int
    """The number of the first of the jobs."""
    points: list[tuple[float, float]]

    @property
    def end(self) -> tuple[float, float]:
        """The last point whose loss is a number."""
        known = [point for point in self.points if math.isfinite(point[1])]
        return known[-1] if known else (math.nan, math.nan)

    @property
    def is_lost(self) -> bool:
        """Whether its loss became nan or infinite."""
        return not math.isfinite(self.points[-1][1])

    def label(self, report: Report) -> str:
        """The settings of its jobs, or their names."""
        labels = [report.label(row) for row in self.rows]
        names = {label.partition("=")[0] for label in labels}
        if len(names) == 1 and not any(" " in label for label in labels):  # stage=0, 1, 2, 3
            labels[1:] = [label.partition("=")[2] for label in labels[1:]]
        words, common = ", ".join(labels), report.label(*self.rows)
        if common and len(labels) > 1:
            words = f"{common}, {len(labels)} jobs"
        return words if all(labels) and len(words) <= MAX_LABEL else f"job{'s' * (len(labels) > 1)} {self.names}"

    @property
    def names(self) -> str:
        """The names of its jobs."""
        return shortened(names_of([row.job for row in self.rows]), 60)


def loss_section(report: Report) -> Markup:
    """The section of the page; empty where no job has left a curve."""
    plots, kinds, axes = [], {}, {}
    for kind, name in KINDS.items():
        curves = [row.val if kind == "val" else row.train for row in report.rows]
        if max((len(curve.loss) for curve in curves), default=0) < 2:
            continue
        for axis in AXES:
            if plot := _plot(report, curves, kind, axis):
                plots.append(plot)
                kinds[kind], axes[axis] = name.removesuffix(" loss"), SHORT_NAMES[axis]
    if not plots:
        return Markup()
    head = tag("div", tag("h2", "Loss"), _switch("kind", "Loss", kinds), _switch("x", "Over", axes), class_="head")
    return tag("section", head, *plots, id="loss")


def _switch(name: str, legend: str, choices: dict[str, str]) -> Markup:
    if len(choices) < 2:
        return Markup()
    options = [
        tag("label", tag("input", type="radio", name=name, value=value, checked=not place), tag("span", words))
        for place, (value, words) in enumerate(choices.items())
    ]
    return tag("fieldset", tag("legend", legend, class_="vh"), *options, class_="switch")


def _plot(report: Report, curves: Sequence[Curve], kind: str, axis: str) -> Markup:
    lines = _lines(report.rows, curves, axis)
    if not lines:
        return Markup()
    x = scale_of((point[0] for line in lines for point in line.points), from_zero=True)
    losses = [point[1] for line in lines for point in line.points if math.isfinite(point[1])]
    first = FIRST_PART * x.high if max(len(line.points) for line in lines) >= MIN_CUT_POINTS else 0.0
    well = [line for line in lines if any(row in report.ranked for row in line.rows)]
    y = scale_of(losses, usual=[point[1] for line in well for point in line.points if point[0] >= first])
    best = report.ranked[0] if report.ranked else None
    num = sum(len(line.rows) for line in lines)
    are_few = len(lines) <= NUM_COLOURS
    ordered = sorted(lines, key=lambda line: best is not None and best in line.rows)
    paths = [_path(report, line, x, y, "best" if best in line.rows else "other", are_few=are_few) for line in ordered]
    words = f"The {KINDS[kind]} of {num} job{'s' * (num > 1)} over {NAMES[axis]}, from {y.low:.3g} to {y.high:.3g}."
    grid = "".join(f"M0 {round(HEIGHT * (1 - y.part(tick)))}h{WIDTH}" for tick in y.ticks())
    picture = tag(
        "svg",
        tag("path", class_="grid", d=grid),
        *paths,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )
    left = [tag("span", in_short(tick), style=f"top:{percent(1 - y.part(tick))}") for tick in y.ticks()]
    places = [(x.part(tick), in_short(tick)) for tick in x.ticks()]
    below = [
        tag("span", words, style=f"left:{percent(part)}", class_="last" if part > 0.95 else None)
        for part, words in places
    ]
    lost = [_cross(line, x, y, are_few=are_few) for line in lines if line.is_lost] if len(lines) <= 40 else []
    labelled = lines if are_few else [line for line in lines if best is not None and best in line.rows]
    notes = [f"{KINDS[kind].capitalize()} over {NAMES[axis]}."]
    notes += ["\N{MULTIPLICATION SIGN} is where a loss became nan or infinite."] if lost else []
    notes += [f"Losses above {y.high:.3g} are cut off."] if max(losses, default=0.0) > y.high else []
    notes += (
        []
        if are_few
        else [f"{num} jobs; the best has the colour. Point at a row of the table, or choose it, to see its curve."]
    )
    frame = tag(
        "div",
        tag("div", *left, class_="left"),
        tag("div", picture, *lost, class_="picture"),
        _ends(report, labelled, y, are_few=are_few) if num > 1 else "",
        tag("div", *below, class_="below"),
        class_="frame alone" if num == 1 else "frame" if are_few else "frame many",
    )
    return tag("figure", frame, tag("figcaption", " ".join(notes)), class_="plot", data_kind=kind, data_x=axis)


def _lines(rows: Sequence[Row], curves: Sequence[Curve], axis: str) -> list[_CurveLine]:
    """The curves that have points, equal ones together."""
    most = max(MIN_POINTS, min(MOST_POINTS, MAX_PLOT_POINTS // max(1, len(rows))))
    found: dict[str, _CurveLine] = {}
    for place, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        points = curve.over(axis, most)
        if any(math.isfinite(loss) for _, loss in points):
            found.setdefault(repr(points), _CurveLine([], place, points)).rows.append(row)
    return list(found.values())


def _path(report: Report, line: _CurveLine, x: Scale, y: Scale, role: str, *, are_few: bool) -> Markup:
    words = f"job {line.names}: {report.label(*line.rows)} {line.end[1]:.4f}"
    path = path_of(line.points, x, y)
    style = f"c{line.place % NUM_COLOURS}" if are_few else role
    curve = tag("path", tag("title", words), class_=style, d=path, data_j=line.place)
    if len(line.points) > 12 or not are_few:
        return curve
    dots = "".join(f"{path_of([point], x, y)}h0" for point in line.points if math.isfinite(point[1]))
    return joined([curve, tag("path", class_=f"dots {style}", d=dots)])


def _cross(line: _CurveLine, x: Scale, y: Scale, *, are_few: bool) -> Markup:
    left, top = x.part(line.end[0]), min(1.0, max(0.0, 1 - y.part(line.end[1])))
    style = f"c{line.place % NUM_COLOURS}" if are_few else "other"
    place = f"left:{percent(left)};top:{percent(top)}"
    return tag("b", "\N{MULTIPLICATION SIGN}", class_=f"lost {style}", style=place, aria_hidden="true")


def _ends(report: Report, lines: Sequence[_CurveLine], y: Scale, *, are_few: bool) -> Markup:
    """A label at the end of each line, moved so that none covers another."""
    placed = sorted(((min(1.0, max(0.0, 1 - y.part(line.end[1]))), line) for line in lines), key=lambda each: each[0])
    tops: list[float] = []
    for top, _ in placed:
        tops.append(max(top, tops[-1] + LABEL_ROOM) if tops else top)
    limit = 1.0
    for place in reversed(range(len(tops))):
        tops[place] = min(tops[place], limit)
        limit = tops[place] - LABEL_ROOM
    labels = []
    for top, (_, line) in zip(tops, placed, strict=True):
        style = f"c{line.place % NUM_COLOURS}" if are_few else "best"
        words = line.label(report) if are_few else f"best: job {line.names}"
        swatch = tag("i", class_=f"line {style}")
        lost = " \N{MULTIPLICATION SIGN}" if line.is_lost else ""
        labels.append(tag("span", swatch, f"{words}{lost}", style=f"top:{percent(top)}", data_j=line.place))
    return tag("div", *labels, class_="ends")
