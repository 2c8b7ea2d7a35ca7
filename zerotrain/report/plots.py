"""The plots of a report, as places and paths for the page's template: losses over steps, tokens and time, bars, and
settings beside losses."""

import json
import math
import statistics
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotrain.report.rows import AXES, KINDS, NO_CURVE, Curve, Report, Row, jobs_named, names_of, points_over
from zerotrain.report.values import in_bytes, is_number, shortened, value_text
from zerotrain.training.report import short

# From numbers to places on a picture: round ticks, and a range that a few outliers do not widen.


WIDTH, HEIGHT = 1000, 400
"""Units of a picture; a browser stretches it to its room."""
NUM_TICKS = 5
LEAST = 1e-200
"""The least range: below it floats have no digits left."""
CUT = 2.2
"""Outliers are cut off beyond so many times the range from the least value to the ninth of ten."""


@dataclass(frozen=True)
class Axis:
    """A range of numbers along one side of a picture."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """The place of a number, 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def top(self, value: float) -> float:
        """The place of a number from the top of the picture, 0 to 1, also of one beyond the range."""
        return min(1.0, max(0.0, 1 - self.part(value)))

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(place, words) of about five round numbers within the range."""
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.9)
        lowest, highest = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [step * number for number in range(lowest, min(highest, lowest + 2 * NUM_TICKS) + 1)]
        return [(self.part(value), short(value, 4)) for value in values]


def axis_of(values: Iterable[float], *, from_zero: bool = False, usual: Iterable[float] = ()) -> Axis:
    """The axis of all finite values.

    Args:
        from_zero: whether 0 is its low end.
        usual: the values to count; one far above nine of ten of them is left out.
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


@dataclass(kw_only=True)
class Line:
    """A line of a picture, for one job or for several with equal curves."""

    rows: list[Row]
    place: int
    """The number of the first of the jobs in the report."""
    points: Sequence[tuple[float, float]]
    style: str = "other"
    """The class of its colour."""
    title: str = ""
    """Words to show beside it; empty for one of many: the page makes them of its row in the table."""
    path: str = ""
    dots: str = ""
    """Its points, where they are few."""
    label: str = ""
    """Words at its end; empty for none."""
    label_top: float = 0.0
    """Their place, from the top of the picture: no label covers another."""
    is_best: bool = False

    @property
    def end(self) -> tuple[float, float]:
        """The last point with a number for its loss."""
        return [point for point in self.points if math.isfinite(point[1])][-1]

    @property
    def is_lost(self) -> bool:
        """Whether its loss became nan or infinite."""
        return not math.isfinite(self.points[-1][1])


# Losses over steps, tokens and seconds of training.


NUM_COLOURS = 8
"""So many jobs have a colour and a label each; of more the best alone stands out."""
MAX_PLOT_POINTS = 4_000
"""Points of all curves of a picture, but for the best."""
MIN_POINTS, MIN_BEST_POINTS, MOST_POINTS = 20, 60, 200
NUM_WITH_DOTS = 12
"""A curve of so few points shows each."""
NUM_LOST = 40
"""Each lost curve has a mark, if there are no more curves than these."""
LABEL_ROOM = 0.075
"""Part of a picture's height taken by a label."""
LOSSES = {"val": "validation", "train": "training"}
LOSS_NAMES = ("val_loss", "train_loss")
MAX_LABEL, MAX_TITLE = 34, 60
FIRST_PART = 0.25
"""In this part of a picture losses fall from high above; the scale is made for the rest."""
MIN_CUT_POINTS = 5


@dataclass(frozen=True, kw_only=True)
class LossPlot:
    """The losses of all jobs, over each axis on which their lines are the same."""

    kind: str
    """One of `LOSSES`."""
    scales: dict[str, Axis]
    """By the names in `AXES`."""
    y: Axis
    lines: list[Line]
    """The best job's is drawn last."""
    num_jobs: int
    are_few: bool
    """Whether each line has a colour of its own."""
    is_cut: bool
    """Whether a loss lies above the picture."""


def loss_plots(report: Report) -> list[LossPlot]:
    """A plot of each loss over each axis, as far as jobs have left curves."""
    plots: list[LossPlot] = []
    for kind in LOSSES:
        curves = [row.curves.get(f"{kind}_loss", NO_CURVE) for row in report.rows]
        if max(map(len, curves), default=0) < 2:
            continue
        by_paths: dict[tuple[str, ...], LossPlot] = {}
        for over in AXES:
            if lines := _lines(report, curves, over):
                plot = _loss_plot(report, lines, kind, over)
                by_paths.setdefault(tuple(line.path for line in lines), plot).scales.update(plot.scales)
        plots += by_paths.values()
    return plots


def _lines(report: Report, curves: Sequence[Curve], over: str) -> list[Line]:
    """A line for each curve with points; equal ones share a line."""
    most = max(MIN_POINTS, min(MOST_POINTS, MAX_PLOT_POINTS // max(1, len(report.rows))))
    by_points: dict[str, Line] = {}
    for place, (row, curve) in enumerate(zip(report.rows, curves, strict=True)):
        points = points_over(curve, over, most)
        if any(math.isfinite(loss) for _, loss in points):
            by_points.setdefault(repr(points), Line(rows=[], place=place, points=points)).rows.append(row)
    for line in by_points.values():
        if report.ranked and report.ranked[0] in line.rows:
            line.is_best, line.points = True, points_over(curves[line.place], over, max(most, MIN_BEST_POINTS))
    return list(by_points.values())


def _loss_plot(report: Report, lines: list[Line], kind: str, over: str) -> LossPlot:
    x = axis_of((point[0] for line in lines for point in line.points), from_zero=True)
    losses = [point[1] for line in lines for point in line.points if math.isfinite(point[1])]
    start = FIRST_PART * x.high if max(len(line.points) for line in lines) >= MIN_CUT_POINTS else 0.0
    ranked = [line for line in lines if any(row in report.ranked for row in line.rows)]
    y = axis_of(losses, usual=[point[1] for line in ranked for point in line.points if point[0] >= start])
    best = next((line for line in lines if line.is_best), None)
    num_jobs, are_few = sum(len(line.rows) for line in lines), len(lines) <= NUM_COLOURS
    for line in lines:
        if are_few or line.is_best:
            line.title = f"job {_names(line.rows)}: {report.label(*line.rows)} {line.end[1]:.4f}"
        line.path = path_of(line.points, x, y)
        if are_few:
            line.style = f"c{line.place % NUM_COLOURS}"
        elif line.is_best:
            line.style = "best"
        if are_few and len(line.points) <= NUM_WITH_DOTS:
            line.dots = "".join(path_of([point], x, y) + "h0" for point in line.points if math.isfinite(point[1]))
    if are_few and num_jobs > 1:
        _set_labels([(line, _label(report, line.rows)) for line in lines], y)
    elif best is not None and num_jobs > 1:
        _set_labels([(best, f"best: job {_names(best.rows)}")], y)
    return LossPlot(
        kind=kind,
        scales={over: x},
        y=y,
        lines=sorted(lines, key=lambda line: line.is_best),
        num_jobs=num_jobs,
        are_few=are_few,
        is_cut=max(losses) > y.high,
    )


def _names(rows: Sequence[Row]) -> str:
    return shortened(names_of(rows), MAX_TITLE)


def _label(report: Report, rows: Sequence[Row]) -> str:
    """The settings of jobs, or their names."""
    labels = [report.label(row) for row in rows]
    names = {label.partition("=")[0] for label in labels}
    if len(names) == 1 and not any(" " in label for label in labels):  # stage=0, 1, 2, 3
        labels[1:] = [label.partition("=")[2] for label in labels[1:]]
    words, common = ", ".join(labels), report.label(*rows)
    if common and len(labels) > 1:
        words = f"{common}, {len(labels)} jobs"
    if all(labels) and len(words) <= MAX_LABEL:
        return words
    return f"{'jobs' if len(labels) > 1 else 'job'} {_names(rows)}"


def _set_labels(labels: list[tuple[Line, str]], y: Axis) -> None:
    """Label the ends of lines. A label moves down, or up from the bottom, where another would cover it."""
    labels = sorted(labels, key=lambda label: y.top(label[0].end[1]))
    lowest = 0.0
    for line, words in labels:
        line.label = f"{words} \N{MULTIPLICATION SIGN}" if line.is_lost else words
        line.label_top = max(y.top(line.end[1]), lowest)
        lowest = line.label_top + LABEL_ROOM
    highest = 1.0
    for line, _ in reversed(labels):
        line.label_top = min(line.label_top, highest)
        highest = line.label_top - LABEL_ROOM


# All curves, for the page's script.


MAX_CURVES, MAX_NBYTES = 40, 85_000
"""Metrics to choose from, and the most bytes of their points: a page of 200 jobs stays under 300 kB."""
POINT_NBYTES = 4
"""Bytes of a point of a curve, with its share of all else."""
NO_VALUE = 2**16 - 1
"""Stands for nan: the values of a metric are told in so many steps less one, from its least to its most."""


def curves_of(report: Report) -> str:
    """The curves of all jobs as JSON that no tag of a page can be closed with: {names: the telling settings of each
    job, steps: lists of steps, curves: {metric: {low, high, log, jobs: {place: [number of its steps, values]}}}}.

    Values are 16 bits each, little endian, in base64; over the logarithm where all of a metric are above 0.
    """
    counts = Counter(
        name for row in report.rows for name, curve in row.curves.items() if np.isfinite(curve.value).sum() > 1
    )
    most = sorted(name for name, _ in counts.most_common(MAX_CURVES))
    names = [*(name for name in LOSS_NAMES if name in most), *(name for name in most if name not in LOSS_NAMES)]
    num_points = min(MOST_POINTS, MAX_NBYTES // (POINT_NBYTES * max(1, sum(counts[name] for name in names))))
    content = _packed(report, names, max(2, num_points))
    while len(content) > MAX_NBYTES and names:  # of long names, or of many different steps
        names = names if num_points > 2 else names[: len(names) // 2]
        num_points = min(num_points - 1, num_points * MAX_NBYTES // len(content))
        content = _packed(report, names, max(2, num_points))
    return content.replace("<", "\\u003c")


def _packed(report: Report, names: Sequence[str], num_points: int) -> str:
    steps: dict[tuple[int, ...], int] = {}
    curves = {}
    for name in names:
        points = [points_over(row.curves.get(name, NO_CURVE), "step", num_points) for row in report.rows]
        finite = [value for job in points for _, value in job if math.isfinite(value)]
        if not finite:
            continue
        is_log = min(finite) > 0
        low, high = (math.log(end) if is_log else end for end in (min(finite), max(finite)))
        jobs = {}
        for place, job in enumerate(points):
            if len(job) < 2:
                continue
            values = np.array([value for _, value in job])
            parts = ((np.log(values) if is_log else values) - low) / max(high - low, LEAST)
            codes = np.where(np.isfinite(values), np.rint(parts * (NO_VALUE - 1)), NO_VALUE).astype("<u2")
            number = steps.setdefault(tuple(int(step) for step, _ in job), len(steps))
            jobs[place] = [number, b64encode(codes.tobytes()).decode()]
        curves[shortened(name, MAX_TITLE)] = {"low": low, "high": high, "log": is_log, "jobs": jobs}
    body = {"names": [report.label(row) for row in report.rows], "steps": [*steps], "curves": curves}
    return json.dumps(body, separators=(",", ":"))


# Bars: the memory of a rank and the bytes that it sends, beside the theory, and the parts of a step's time.


MAX_BARS = 12
NEAR = 0.005
"""A measured number is told as equal to the theory if it differs by no larger part."""
_TIMES = {"comm_wait_ms": "communication", "update_ms": "update", "data_wait_ms": "data"}
"""The columns of a step's parts, and their names; the rest of the step is its compute."""
_HELD_NOTE = (
    "Held by rank 0 between steps; the thin bar is the theory. The peak is that of the process, without libraries."
)
_SENT_NOTE = "By rank 0 in the last step; the thin bar is the theory."
_HELD_REASONS = (
    " It holds less where other ranks update whole tensors of its share.",
    " It holds more where shards are padded, or where it updates whole tensors.",
)
"""Why bytes lie below the theory, and why above."""
_SENT_REASONS = (
    " It sends less where stage 3 keeps the first and the last unit gathered from the forward to the backward.",
    " It sends more where shards are padded, or where gloo reduces by itself (zero.reduction=native on CPUs), which "
    "sends each byte twice.",
)
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
    """A bar for jobs with the same numbers."""

    name: str
    """The settings of its jobs, or their names."""
    words: str
    """The numbers, beside the bar."""
    sizes: Sequence[float]
    """The sizes of its parts, from the left."""
    theory: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Bars on one scale."""

    key: str
    title: str
    bars: list[Bar]
    parts: Sequence[str]
    """The names of the parts of each bar."""
    note: str

    @property
    def largest(self) -> float:
        """The size of the largest bar."""
        return max(sum(sizes) for bar in self.bars for sizes in (bar.sizes, bar.theory))


def bar_charts(report: Report) -> list[BarChart]:
    """The bytes held by rank 0 at rest and sent in a step, and the time of a step, by their parts. A chart
    without numbers is left out."""
    charts = [
        _byte_chart(report, "memory", "Memory", KINDS, _HELD_NOTE, _HELD_REASONS),
        _byte_chart(report, "sent", "Sent in a step", ["sent"], _SENT_NOTE, _SENT_REASONS),
        _time_chart(report),
    ]
    return [chart for chart in charts if any(sum(bar.sizes) for bar in chart.bars)]


def _byte_chart(
    report: Report, key: str, title: str, kinds: Sequence[str], note: str, reasons: tuple[str, str]
) -> BarChart:
    """The bytes of each kind beside the theory. Jobs with equal bytes share a bar.

    Args:
        reasons: why bytes lie below the theory, and why above: for the note, where some do.
    """
    columns = [f"{prefix}{kind}_nbytes" for prefix in ("", "theory_") for kind in kinds]
    groups: dict[tuple[float, ...], list[Row]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row[name] or 0.0 for name in columns), []).append(row)
    bars = []
    is_below = is_above = False
    for nbytes, rows in groups.items():
        if not any(nbytes):
            continue
        sizes, theory_sizes = nbytes[: len(kinds)], nbytes[len(kinds) :]
        measured, theory = sum(sizes), sum(theory_sizes)
        words = in_bytes(measured)
        if theory:
            is_near = abs(measured - theory) <= NEAR * theory
            is_below |= not is_near and measured < theory
            is_above |= not is_near and measured > theory
            words += ", as in theory" if is_near else f", theory {in_bytes(theory)}"
        if len(kinds) > 1 and (peaks := [peak for row in rows if (peak := row["peak_nbytes"])]):
            words += f", peak {in_bytes(max(peaks))}"
        bars.append(Bar(name=_bar_name(report, rows), words=words, sizes=sizes, theory=theory_sizes))
    below, above = reasons
    note += (below if is_below else "") + (above if is_above else "")
    return BarChart(key=key, title=title, bars=bars, parts=kinds, note=note)


def _time_chart(report: Report) -> BarChart:
    rows = report.ranked if len(report.rows) > MAX_BARS else report.rows
    bars = []
    for row in rows:
        step_ms = left_ms = row["step_ms_median"] or 0.0
        if step_ms <= 0:
            continue
        sizes, words = [], f"{step_ms:,.1f} ms"
        for name, part in _TIMES.items():
            part_ms = min(max(row[name] or 0.0, 0.0), left_ms)
            left_ms -= part_ms
            sizes.append(part_ms)
            words += f", {part_ms / step_ms:.1%} {part}" if part_ms else ""
        bars.append(Bar(name=_bar_name(report, [row]), words=words, sizes=[left_ms, *sizes]))
    is_split = any(row["comm_wait_ms"] is not None for row in rows)
    note = _SPLIT_NOTE if is_split else _UNSPLIT_NOTE
    note += " The best jobs come first." if len(rows) > MAX_BARS else ""
    parts = ["compute" if is_split else "compute, communication, update", *_TIMES.values()]
    return BarChart(key="time", title="Time of a step", bars=bars, parts=parts, note=note)


def _bar_name(report: Report, rows: list[Row]) -> str:
    label = report.label(*rows)
    if not label:
        return jobs_named(rows)
    return f"{label}, {len(rows)} jobs" if len(rows) > 1 else label


# Parallel coordinates: a line for each job through its settings to its loss, and what each setting explains.


MIN_JOBS = 20
MAX_AXES = 8
MOST_VALUES = 10
"""So many values of a setting are each told beside its axis."""
BEST_PART = 10
"""One of so many jobs is among the best."""
NUM_BINS = 4
"""The values of a setting are divided into so many parts, if there are more."""


@dataclass(frozen=True, kw_only=True)
class SettingAxis:
    """A setting, from the bottom of the picture to its top: its values at equal distances."""

    setting: str
    places: dict[str, float]
    """Value, as `repr` writes it -> its place, 0 at the bottom."""
    ticks: list[tuple[float, str]]
    """(place, words) of the values; of many those of the ends and of the middle."""
    part: float | None
    """See `explained`."""


def parallel(report: Report) -> tuple[list[SettingAxis], Axis, list[Line]] | None:
    """The axes of the most telling settings, the axis of the loss, and a line for each job, the best last. None
    for fewer jobs than `MIN_JOBS`, or where no setting differs."""
    rows, axes = report.ranked, []
    for name in report.settings if len(rows) >= MIN_JOBS else ():
        values = _sorted_values(row.settings.get(name) for row in rows)
        if len(values) > 1:
            places = {repr(value): place / (len(values) - 1) for place, value in enumerate(values)}
            shown = values if len(values) <= MOST_VALUES else [values[0], values[len(values) // 2], values[-1]]
            ticks = [(places[repr(value)], value_text(name, value)) for value in shown]
            axes.append(SettingAxis(setting=name, places=places, ticks=ticks, part=explained(report, name)))
    if not axes:
        return None
    axes = sorted(axes, key=lambda axis: -(axis.part or 0.0))[:MAX_AXES]
    losses = [report.loss_of(row) for row in rows]
    y, num_best = axis_of(losses, usual=losses), max(1, len(rows) // BEST_PART)
    lines = []
    for rank, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        heights = [axis.places[repr(row.settings.get(axis.setting))] for axis in axes]
        points = list(enumerate([*heights, min(1.0, y.part(loss))]))
        line = Line(
            rows=[row],
            place=report.rows.index(row),
            points=points,
            style="best" if rank < num_best else "other",
            title=f"job {row.job}: {loss:.4f}",
            path=path_of(points, Axis(0, len(axes)), Axis(0, 1)),
        )
        lines.append(line)
    return axes, y, lines[::-1]


def explained(report: Report, name: str) -> float | None:
    """The part of the variance of the loss, 0 to 1, explained by one setting alone: the correlation ratio over at most
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
