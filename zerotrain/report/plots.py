"""The plots of a report, as places and paths for the page's template: losses over steps, tokens and time, bars, and
settings beside losses."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotrain.report.rows import KINDS, Curve, Report, Row, jobs_named, names_of, points_over
from zerotrain.report.values import in_bytes, in_short, is_number, shortened, value_text

# From numbers to places on a picture: round ticks, and a range that a few outliers do not widen.


WIDTH, HEIGHT = 1000, 400
"""Units of a picture, which a browser stretches to the room that there is."""
NUM_TICKS = 5
LEAST = 1e-200
"""The least range, below which floats have no digits left."""
CUT = 2.2
"""Ranges from the least value to the ninth of ten, beyond which outliers are cut off."""


@dataclass(frozen=True)
class Axis:
    """A range of numbers along one side of a picture."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """The place of a number, 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(place, words) of about five round numbers within the range."""
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.9)
        lowest, highest = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [step * number for number in range(lowest, min(highest, lowest + 2 * NUM_TICKS) + 1)]
        return [(self.part(value), in_short(value)) for value in values]


def axis_of(values: Iterable[float], *, from_zero: bool = False, usual: Iterable[float] = ()) -> Axis:
    """The axis on which all finite values lie.

    Args:
        from_zero: whether 0 is its low end.
        usual: values that count; what lies far above nine of ten of them is left out.
    """
    finite = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low = 0.0 if from_zero else finite[0]
    high = max(low, finite[-1])
    counted = sorted(value for value in usual if math.isfinite(value))
    if counted and (ninth := counted[math.ceil(0.9 * (len(counted) - 1))]) > low:
        high = min(high, low + CUT * (ninth - low))
    if not high - low > max(1e-9 * max(abs(high), abs(low)), LEAST):
        room = abs(high) / 2 if abs(high) > LEAST else 0.5
        return Axis(low, high + room) if from_zero else Axis(low - room, high + room)
    room = 0.0 if from_zero else 0.04 * (high - low)
    return Axis(low - room, high + room)


def path_of(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    """The line through points, interrupted where one is not finite. Numbers are whole, and each is told by its
    distance from the one before: a page has thousands."""
    parts, previous = [], None
    for value, height in points:
        if not math.isfinite(value) or not math.isfinite(height):
            previous = None
            continue
        top = max(-1.0, min(2.0, y.part(height)))
        place = round(WIDTH * x.part(value)), round(HEIGHT * (1 - top))
        if previous is None:
            parts.append(f"M{place[0]} {place[1]}")
        elif place != previous:
            across, down = place[0] - previous[0], place[1] - previous[1]
            parts.append(f"l{across} {down}" if down >= 0 else f"l{across}{down}")
        previous = place
    return "".join(parts)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a picture."""

    place: int
    """The number of its job in the report."""
    style: str
    title: str
    path: str
    dots: str = ""
    """Its points, where they are few."""


# Losses over steps, tokens and seconds of training.


NUM_COLOURS = 8
"""Jobs that each have a colour and a label; of more the best alone stands out."""
MAX_PLOT_POINTS = 12_000
"""Points of all curves of a picture."""
MIN_POINTS, MOST_POINTS = 40, 200
NUM_WITH_DOTS = 12
"""Points of a curve that are each drawn."""
NUM_LOST = 40
"""Curves of which each lost one has a mark."""
LABEL_ROOM = 0.075
"""Part of a picture's height that a label takes."""
AXES = {"step": "steps", "tokens": "tokens", "train_s": "seconds of training"}
LOSSES = {"val": "validation", "train": "training"}
MAX_LABEL, MAX_TITLE = 34, 60
FIRST_PART = 0.25
"""Part of a picture in which losses fall from high above; the scale is made for what comes after it."""
MIN_CUT_POINTS = 5


@dataclass(frozen=True)
class _SharedCurve:
    """Equal curves of one or more jobs."""

    rows: list[Row]
    place: int
    """The number of the first of the jobs."""
    points: list[tuple[float, float]]

    @property
    def end(self) -> tuple[float, float]:
        """The last point whose loss is a number."""
        return [point for point in self.points if math.isfinite(point[1])][-1]

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
        if all(labels) and len(words) <= MAX_LABEL:
            return words
        return f"{'jobs' if len(labels) > 1 else 'job'} {self.names}"

    @property
    def names(self) -> str:
        """The names of its jobs."""
        return shortened(names_of(self.rows), MAX_TITLE)


@dataclass(frozen=True, kw_only=True)
class LossPlot:
    """The losses of all jobs over one axis."""

    kind: str
    """One of `LOSSES`."""
    over: str
    """One of `AXES`."""
    x: Axis
    y: Axis
    lines: list[Line]
    """The best job's is drawn last."""
    lost: list[tuple[float, float, str]]
    """(from the left, from the top, style) of each end of a curve whose loss became nan or infinite."""
    labels: list[tuple[float, str, int, str]]
    """(from the top, style, number of its job, words) of the labels at the ends of curves."""
    grid: str
    words: str
    """Those for whoever hears the page."""
    note: str
    style: str


def loss_plots(report: Report) -> list[LossPlot]:
    """A plot of each loss over each axis, as far as jobs have left curves."""
    plots = []
    for kind in LOSSES:
        curves = [row.val if kind == "val" else row.train for row in report.rows]
        if max(map(len, curves), default=0) > 1:
            plots += [
                _loss_plot(report, shared, kind, over) for over in AXES if (shared := _shared(report, curves, over))
            ]
    return plots


def _shared(report: Report, curves: Sequence[Curve], over: str) -> list[_SharedCurve]:
    """The curves that have points, equal ones together."""
    most = max(MIN_POINTS, min(MOST_POINTS, MAX_PLOT_POINTS // max(1, len(report.rows))))
    by_points: dict[str, _SharedCurve] = {}
    for place, (row, curve) in enumerate(zip(report.rows, curves, strict=True)):
        points = points_over(curve, over, most)
        if any(math.isfinite(loss) for _, loss in points):
            by_points.setdefault(repr(points), _SharedCurve([], place, points)).rows.append(row)
    return list(by_points.values())


def _loss_plot(report: Report, curves: list[_SharedCurve], kind: str, over: str) -> LossPlot:
    x = axis_of((point[0] for curve in curves for point in curve.points), from_zero=True)
    losses = [point[1] for curve in curves for point in curve.points if math.isfinite(point[1])]
    start = FIRST_PART * x.high if max(len(curve.points) for curve in curves) >= MIN_CUT_POINTS else 0.0
    ranked = [curve for curve in curves if any(row in report.ranked for row in curve.rows)]
    y = axis_of(losses, usual=[point[1] for curve in ranked for point in curve.points if point[0] >= start])
    best = next((curve for curve in curves if report.ranked and report.ranked[0] in curve.rows), None)
    num, are_few = sum(len(curve.rows) for curve in curves), len(curves) <= NUM_COLOURS
    styles = {
        curve.place: f"c{curve.place % NUM_COLOURS}" if are_few else "best" if curve is best else "other"
        for curve in curves
    }
    lines = []
    for curve in sorted(curves, key=lambda curve: curve is best):
        dots = [path_of([point], x, y) + "h0" for point in curve.points if math.isfinite(point[1])]
        line = Line(
            place=curve.place,
            style=styles[curve.place],
            title=f"job {curve.names}: {report.label(*curve.rows)} {curve.end[1]:.4f}",
            path=path_of(curve.points, x, y),
            dots="".join(dots) if are_few and len(curve.points) <= NUM_WITH_DOTS else "",
        )
        lines.append(line)
    lost = [curve for curve in curves if curve.is_lost and len(curves) <= NUM_LOST]
    loss = f"{LOSSES[kind]} loss"
    notes = [f"{loss.capitalize()} over {AXES[over]}."]
    notes += ["\N{MULTIPLICATION SIGN} is where a loss became nan or infinite."] if lost else []
    notes += [f"Losses above {y.high:.3g} are cut off."] if max(losses) > y.high else []
    if not are_few:
        notes.append(
            f"{num} jobs; the best has the colour. Point at a row of the table, or choose it, to see its curve."
        )
    jobs = f"{num} {'jobs' if num > 1 else 'job'}"
    labelled = curves if are_few else [best] if best is not None else []
    return LossPlot(
        kind=kind,
        over=over,
        x=x,
        y=y,
        lines=lines,
        lost=[(x.part(curve.end[0]), _top(curve, y), styles[curve.place]) for curve in lost],
        labels=_labels(report, labelled, y, styles, are_few=are_few) if num > 1 else [],
        grid="".join(f"M0 {round(HEIGHT * (1 - part))}h{WIDTH}" for part, _ in y.ticks),
        words=f"The {loss} of {jobs} over {AXES[over]}, from {y.low:.3g} to {y.high:.3g}.",
        note=" ".join(notes),
        style="frame alone" if num == 1 else "frame" if are_few else "frame many",
    )


def _top(curve: _SharedCurve, y: Axis) -> float:
    """The place of a curve's end from the top of the picture."""
    return min(1.0, max(0.0, 1 - y.part(curve.end[1])))


def _labels(
    report: Report, curves: Sequence[_SharedCurve], y: Axis, styles: dict[int, str], *, are_few: bool
) -> list[tuple[float, str, int, str]]:
    """A label at the end of each curve, moved so that none covers another."""
    placed = sorted(curves, key=lambda curve: _top(curve, y))
    tops: list[float] = []
    for curve in placed:
        tops.append(max(_top(curve, y), tops[-1] + LABEL_ROOM) if tops else _top(curve, y))
    limit = 1.0
    for place in reversed(range(len(tops))):
        tops[place] = min(tops[place], limit)
        limit = tops[place] - LABEL_ROOM
    labels = []
    for top, curve in zip(tops, placed, strict=True):
        words = curve.label(report) if are_few else f"best: job {curve.names}"
        lost = " \N{MULTIPLICATION SIGN}" if curve.is_lost else ""
        labels.append((top, styles[curve.place], curve.place, f"{words}{lost}"))
    return labels


# Bars: the memory of a rank and the bytes that it sends, beside the theory, and the parts of a step's time.


MAX_BARS = 12
BAR_WIDTH = 1000
NEAR = 0.005
"""Parts by which a measured number may differ from the theory and still be told as equal."""
_TIMES = (("k1", "comm_wait_ms", "communication"), ("k2", "update_ms", "update"), ("k3", "data_wait_ms", "data"))
"""(class of the colour, column, name) of the parts of a step but the first, its compute."""
_HELD_NOTE = (
    "Held by rank 0 between steps; the thin bar is the theory. The peak is that of the process, without libraries."
)
_SENT_NOTE = "By rank 0 in the last step; the thin bar is the theory."
_SPLIT_NOTE = (
    "Median of the steps of rank 0, and the mean of its parts. Communication is waiting for other ranks, which hides "
    "behind nothing."
)
_UNSPLIT_NOTE = (
    "Median of the steps of rank 0, and its mean wait for data. The host does not wait for a GPU, so compute, "
    "communication and update are not told apart; a trace of three steps (train.profile=true) does that."
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar for jobs that have the same numbers."""

    name: str
    """The settings of its jobs, or their names."""
    words: str
    """The numbers, beside the bar."""
    parts: list[tuple[str, float]]
    """(class of the colour, size), from the left."""
    theory: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Bars on one scale."""

    key: str
    title: str
    bars: list[Bar]
    legend: list[tuple[str, str]]
    """(class of the colour, words)."""
    note: str

    def rects(self, parts: Sequence[tuple[str, float]]) -> list[tuple[float, float, str]]:
        """(from the left, width, class of the colour) of each part of a bar, of `BAR_WIDTH` for the largest bar."""
        largest = max(sum(size for _, size in sizes) for bar in self.bars for sizes in (bar.parts, bar.theory))
        rects, offset = [], 0.0
        for style, size in parts:
            width = BAR_WIDTH * size / largest
            if width:
                rects.append((round(offset, 1), round(width, 1), style))
            offset += width
        return rects


def bar_charts(report: Report) -> list[BarChart]:
    """The bytes that rank 0 holds at rest and sends in a step, and the time of a step, by their parts. A
    chart that no job has a number for is left out."""
    charts = [
        _byte_chart(report, "memory", "Memory", KINDS, _HELD_NOTE),
        _byte_chart(report, "sent", "Sent in a step", ["sent"], _SENT_NOTE),
        _time_chart(report),
    ]
    return [chart for chart in charts if any(size for bar in chart.bars for _, size in bar.parts)]


def _byte_chart(report: Report, key: str, title: str, kinds: Sequence[str], note: str) -> BarChart:
    """The bytes of each kind beside the theory. Jobs with equal bytes share a bar."""
    columns = [f"{prefix}{kind}_nbytes" for prefix in ("", "theory_") for kind in kinds]
    groups: dict[tuple[float, ...], list[Row]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[name] or 0.0 for name in columns), []).append(row)
    bars = []
    for sizes, rows in groups.items():
        if not any(sizes):
            continue
        measured, theory = sum(sizes[: len(kinds)]), sum(sizes[len(kinds) :])
        words = in_bytes(measured)
        if theory:
            is_near = abs(measured - theory) <= NEAR * theory
            words += ", as in theory" if is_near else f", theory {in_bytes(theory)}"
        if len(kinds) > 1 and (peaks := [nbytes for row in rows if (nbytes := row["peak_nbytes"])]):
            words += f", peak {in_bytes(max(peaks))}"
        parts = [(f"k{number % len(kinds)}", size) for number, size in enumerate(sizes)]
        bars.append(
            Bar(name=_bar_name(report, rows), words=words, parts=parts[: len(kinds)], theory=parts[len(kinds) :])
        )
    used = {style for bar in bars for style, size in bar.parts if size}
    legend = [(f"k{number}", kind) for number, kind in enumerate(kinds) if len(kinds) > 1 and f"k{number}" in used]
    return BarChart(key=key, title=title, bars=bars, legend=legend, note=note)


def _time_chart(report: Report) -> BarChart:
    rows = report.ranked if len(report.rows) > MAX_BARS else report.rows
    bars = []
    for row in rows:
        step_ms = left_ms = row["step_ms_median"] or 0.0
        if step_ms <= 0:
            continue
        parts, words = [], f"{step_ms:,.1f} ms"
        for style, name, part in _TIMES:
            part_ms = min(max(row[name] or 0.0, 0.0), left_ms)
            left_ms -= part_ms
            parts.append((style, part_ms))
            words += f", {part_ms / step_ms:.1%} {part}" if part_ms else ""
        bars.append(Bar(name=_bar_name(report, [row]), words=words, parts=[("k0", left_ms), *parts]))
    is_split = any(row["comm_wait_ms"] is not None for row in rows)
    note = _SPLIT_NOTE if is_split else _UNSPLIT_NOTE
    note += " The best jobs come first." if len(rows) > MAX_BARS else ""
    used = {style for bar in bars for style, size in bar.parts if size}
    legend = [("k0", "compute" if is_split else "compute, communication, update")]
    legend += [(style, part) for style, _, part in _TIMES if style in used]
    return BarChart(key="time", title="Time of a step", bars=bars, legend=legend, note=note)


def _bar_name(report: Report, rows: list[Row]) -> str:
    label = report.label(*rows)
    if not label:
        return jobs_named(rows)
    return f"{label}, {len(rows)} jobs" if len(rows) > 1 else label


# Parallel coordinates: a line for each job through its settings to its loss, and what each setting explains.


MIN_JOBS = 20
MAX_AXES = 8
MOST_VALUES = 10
"""Values of a setting that are each told beside its axis."""
BEST_PART = 10
"""One of so many jobs is among the best."""
NUM_BINS = 4
"""Parts into which the values of a setting are divided, where it has more."""


@dataclass(frozen=True, kw_only=True)
class SettingAxis:
    """A setting, from the bottom of the picture to its top: its values at equal distances."""

    setting: str
    places: dict[str, float]
    """Value, as `repr` writes it -> its place, 0 at the bottom."""
    ticks: list[tuple[float, str]]
    part: float | None
    """See `explained`."""


def parallel(report: Report) -> tuple[list[SettingAxis], Axis, list[Line]] | None:
    """The axes of the settings that explain most, the axis of the loss, and a line for each job, the best last. None
    for fewer jobs than `MIN_JOBS`, or where no setting differs."""
    rows, axes = report.ranked, []
    for name in report.settings:
        values = _sorted_values(row.settings.get(name) for row in rows)
        if len(values) > 1:
            places = {repr(value): place / (len(values) - 1) for place, value in enumerate(values)}
            tick_values = values if len(values) <= MOST_VALUES else [values[0], values[len(values) // 2], values[-1]]
            ticks = [(places[repr(value)], value_text(name, value)) for value in tick_values]
            axes.append(SettingAxis(setting=name, places=places, ticks=ticks, part=explained(report, name)))
    if len(rows) < MIN_JOBS or not axes:
        return None
    axes = sorted(axes, key=lambda axis: -(axis.part or 0.0))[:MAX_AXES]
    losses = [report.loss_of(row) for row in rows]
    y, num_best = axis_of(losses, usual=losses), max(1, len(rows) // BEST_PART)
    lines = []
    for rank, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        heights = [axis.places[repr(row.settings.get(axis.setting))] for axis in axes]
        line = Line(
            place=report.rows.index(row),
            style="best" if rank < num_best else "other",
            title=f"job {row.job}: {loss:.4f}",
            path=path_of(enumerate([*heights, min(1.0, y.part(loss))]), Axis(0, len(axes)), Axis(0, 1)),
        )
        lines.append(line)
    return axes, y, lines[::-1]


def explained(report: Report, name: str) -> float | None:
    """The part of the variance of the loss, 0 to 1, that one setting alone explains: the correlation ratio over at most
    `NUM_BINS` bins of its values, corrected for their number (epsilon squared, Kelley 1935). None where the completed
    jobs are too few, or all have one loss or one value."""
    pairs = [(repr(row.settings[name]), report.loss_of(row)) for row in report.ranked if name in row.settings]
    values = _sorted_values(row.settings[name] for row in report.ranked if name in row.settings)
    bins: dict[int, list[float]] = {}
    places = {repr(value): place for place, value in enumerate(values)}
    for value, loss in pairs:
        bins.setdefault(places[value] * min(NUM_BINS, len(values)) // len(values), []).append(loss)
    num = len(pairs)
    if num - len(bins) < NUM_BINS or len(bins) < 2:
        return None
    total = statistics.pvariance(loss for _, loss in pairs) * num
    within = sum(statistics.pvariance(losses) * len(losses) for losses in bins.values())
    if not total > 0 or not math.isfinite(total):
        return None
    return max(0.0, 1 - within / total * (num - 1) / (num - len(bins)))


def _sorted_values(values: Iterable[Any]) -> list[Any]:
    """The different values: numbers by size, then all else by its text."""
    different = {repr(value): value for value in values}.values()
    return sorted(different, key=lambda value: (not is_number(value), value if is_number(value) else 0, repr(value)))
