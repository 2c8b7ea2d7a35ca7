"""The plots of a report: losses over steps, tokens and time, bars of a setting, and settings beside each other."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from zerotrain.files.untrusted import printable
from zerotrain.report.rows import (
    AXES,
    KINDS,
    Curve,
    Report,
    Row,
    explained,
    is_number,
    short_names,
    sorted_values,
    value_text,
)
from zerotrain.report.values import in_bytes, in_short, shortened

# Pieces of html, escaped by construction: a text that is no `Markup` yet is escaped and made printable.


MAX_TEXT = 2000
NUM_NAMED = 12
"""Jobs of a list that are named one by one."""
MARKS = {"completed": "\N{CHECK MARK}", "diverged": "\N{NORTH EAST ARROW}", "failed": "\N{MULTIPLICATION SIGN}"}
SHORT_HASH = 8
_VOID = ("input", "meta", "br", "hr")


class Markup(str):
    """Text that is html already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element. An attribute `class_` is `class`, `data_x` is `data-x`; None and False leave it out."""
    parts = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {key}")
        elif value is not None and value is not False:
            parts.append(f' {key}="{text(value if isinstance(value, str) else f"{value:g}")}"')
    opened = f"<{name}{''.join(parts)}>"
    return Markup(opened if name in _VOID else f"{opened}{joined(children)}</{name}>")


def text(value: str) -> Markup:
    """A text as it is to be read."""
    return value if isinstance(value, Markup) else Markup(escape(printable(value, MAX_TEXT, keep="")))


def joined(children: Iterable[str]) -> Markup:
    """Pieces one after the other."""
    return Markup("".join(map(text, children)))


def hidden(words: str) -> Markup:
    """Words for those who hear the page."""
    return tag("span", words, class_="vh")


def names_of(jobs: Sequence[str]) -> str:
    """Jobs in few words: 0-3, 7; of many the first ones and how many more."""
    if all(job.isascii() and job.isdigit() and len(job) < 10 for job in jobs):
        runs: list[list[int]] = []
        for number in sorted(map(int, jobs)):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}\N{EN DASH}{run[-1]}" for run in runs]
    else:
        pieces = [shortened(job, 40) for job in jobs]
    num_hidden = len(pieces) - NUM_NAMED
    return ", ".join(pieces[:NUM_NAMED]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def mark_of(status: str) -> Markup:
    """The sign of a status."""
    style = f"mark {status}" if status in MARKS else "mark"
    return tag("span", MARKS.get(status, "\N{WHITE CIRCLE}"), class_=style, aria_hidden="true")


def hash_of(sha256: str) -> Markup:
    """The first digits of a hash."""
    return tag("code", sha256[:SHORT_HASH], title=sha256)


def letter_of(place: int) -> str:
    """A, B, ..., Z, AA: the name of a group."""
    letter = chr(ord("A") + place % 26)
    return letter if place < 26 else letter_of(place // 26 - 1) + letter


# Bars: the memory of a rank and the bytes that it sends, beside the theory, and the parts of a step's time.


MAX_BARS = 12
BAR_WIDTH = 1000
NEAR = 0.005
"""Parts by which a measured number may differ from the theory and still be told as equal."""

_TIMES = (("k1", "comm_wait_ms", "communication"), ("k2", "update_ms", "update"), ("k3", "data_wait_ms", "data"))
"""(class of the colour, column, name) of the parts of a step but the first, its compute."""

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

    rows: list[Row]
    parts: list[tuple[str, float]]
    """(class of the colour, size), from the left."""
    theory: list[tuple[str, float]]
    words: str
    """The numbers, beside the bar."""

    def name(self, report: Report) -> str:
        """The settings of its jobs, or their names."""
        label, num = report.label(*self.rows), len(self.rows)
        if label:
            return f"{label}, {num} jobs" if num > 1 else label
        return f"{'jobs' if num > 1 else 'job'} {names_of([row.job for row in self.rows])}"


def memory_section(report: Report) -> Markup:
    """Bytes that rank 0 holds at rest, by kind, beside the theory."""
    bars: list[Bar] = []
    for rows in _equal(report.rows, [f"{prefix}{kind}_nbytes" for prefix in ("", "theory_") for kind in KINDS]):
        held = [(f"k{place}", rows[0][f"{kind}_nbytes"] or 0.0) for place, kind in enumerate(KINDS)]
        theory = [(f"k{place}", rows[0][f"theory_{kind}_nbytes"] or 0.0) for place, kind in enumerate(KINDS)]
        words = _compare(sum(size for _, size in held), sum(size for _, size in theory))
        if peaks := [nbytes for row in rows if (nbytes := row["peak_nbytes"])]:
            words += f", peak {in_bytes(max(peaks))}"
        bars.append(Bar(rows=rows, parts=held, theory=theory, words=words))
    used = [place for place in range(len(KINDS)) if any(bar.parts[place][1] for bar in bars)]
    legend = [(f"k{place}", KINDS[place]) for place in used]
    note = (
        "Held by rank 0 between steps; the thin bar is the theory. The peak is that of the process, without libraries."
    )
    return _section(report, "memory", "Memory", bars, legend, note)


def sent_section(report: Report) -> Markup:
    """Bytes that rank 0 sends in a step, beside the theory."""
    bars = []
    for rows in _equal(report.rows, ["sent_nbytes", "theory_sent_nbytes"]):
        sent, theory = rows[0]["sent_nbytes"] or 0.0, rows[0]["theory_sent_nbytes"] or 0.0
        bars.append(Bar(rows=rows, parts=[("k0", sent)], theory=[("k0", theory)], words=_compare(sent, theory)))
    bars = bars if any(bar.parts[0][1] for bar in bars) else []
    return _section(
        report, "sent", "Sent in a step", bars, [], "By rank 0 in the last step; the thin bar is the theory."
    )


def time_section(report: Report) -> Markup:
    """The time of a step, by its parts."""
    bars = []
    rows = report.ranked if len(report.rows) > MAX_BARS else report.rows
    for row in rows:
        step_ms = left_ms = row["step_ms_median"] or 0.0
        if step_ms <= 0:
            continue
        parts, words = [], f"{step_ms:,.1f} ms"
        for style, name, what in _TIMES:
            part_ms = min(max(row[name] or 0.0, 0.0), left_ms)
            left_ms -= part_ms
            parts.append((style, part_ms))
            words += f", {part_ms / step_ms:.1%} {what}" if part_ms else ""
        bars.append(Bar(rows=[row], parts=[("k0", left_ms), *parts], theory=[], words=words))
    is_split = any(row["comm_wait_ms"] is not None for row in rows)
    note = _SPLIT_NOTE if is_split else _UNSPLIT_NOTE
    note += " The best jobs come first." if len(rows) > MAX_BARS else ""
    used = {style for bar in bars for style, size in bar.parts if size}
    legend = [("k0", "compute" if is_split else "compute, communication, update")]
    legend += [(style, what) for style, _, what in _TIMES if style in used]
    return _section(report, "time", "Time of a step", bars, legend, note)


def _equal(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """The rows that have any of these numbers, equal ones together."""
    groups: dict[tuple[float | None, ...], list[Row]] = {}
    for row in rows:
        values = tuple(row[name] for name in names)
        if any(values):
            groups.setdefault(values, []).append(row)
    return list(groups.values())


def _compare(measured: float, theory: float) -> str:
    if not theory:
        return in_bytes(measured)
    near = abs(measured - theory) <= NEAR * theory
    return f"{in_bytes(measured)}, as in theory" if near else f"{in_bytes(measured)}, theory {in_bytes(theory)}"


def _section(
    report: Report, key: str, title: str, bars: Sequence[Bar], legend: Sequence[tuple[str, str]], note: str
) -> Markup:
    """A section with the bars on one scale; empty where there are none."""
    if not bars:
        return Markup()
    largest = max(sum(size for _, size in parts) for bar in bars for parts in (bar.parts, bar.theory))
    items = [
        tag(
            "li",
            tag("span", bar.name(report), class_="name"),
            tag("span", bar.words, class_="words"),
            tag("span", _draw(bar.parts, largest), _draw(bar.theory, largest, "theory"), class_="pair"),
        )
        for bar in bars[:MAX_BARS]
    ]
    if len(bars) > MAX_BARS:
        note += f" {len(bars) - MAX_BARS} more bars are left out."
    keys = tag("p", *(tag("span", tag("i", class_=style), words) for style, words in legend), class_="legend")
    parts = [tag("h2", title), keys if legend else "", tag("ul", *items, class_="bars"), tag("p", note, class_="note")]
    return tag("section", *parts, id=key)


def _draw(parts: Sequence[tuple[str, float]], largest: float, kind: str = "") -> Markup:
    if not any(size for _, size in parts):
        return Markup()
    rects, offset = [], 0.0
    for style, size in parts:
        width = BAR_WIDTH * size / largest if largest else 0.0
        if width:
            rects.append(tag("rect", x=round(offset, 1), width=round(width, 1), height=10, class_=style))
        offset += width
    view = f"0 0 {BAR_WIDTH} 10"
    return tag("svg", joined(rects), viewBox=view, preserveAspectRatio="none", class_=kind or None, aria_hidden="true")


# From numbers to places on a picture: round ticks, and a range that a few outliers do not widen.


WIDTH, HEIGHT = 1000, 400
"""Units of a picture, which a browser stretches to the room that there is."""
NUM_TICKS = 5
LEAST = 1e-200
"""The least range, below which floats have no digits left."""
CUT = 2.2
"""Ranges from the least value to the ninth of ten, beyond which outliers are cut off."""


@dataclass(frozen=True)
class Scale:
    """A range of numbers along one side of a picture."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """The place of a number, 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """About five round numbers within the range."""
        rough = (self.high - self.low) / NUM_TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.9)
        lowest, highest = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * place for place in range(lowest, min(highest, lowest + 2 * NUM_TICKS) + 1)]


def scale_of(values: Iterable[float], *, from_zero: bool = False, usual: Iterable[float] = ()) -> Scale:
    """The scale on which all finite values lie.

    Args:
        from_zero: whether 0 is its low end.
        usual: values that count; what lies far above nine of ten of them is left out.
    """
    finite = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low, high = 0.0 if from_zero else finite[0], finite[-1]
    counted = sorted(value for value in usual if math.isfinite(value))
    if counted and (ninth := counted[math.ceil(0.9 * (len(counted) - 1))]) > low:
        high = min(high, low + CUT * (ninth - low))
    if not high - low > max(1e-9 * max(abs(high), abs(low)), LEAST):
        room = abs(high) / 2 if abs(high) > LEAST else 0.5
        return Scale(low, high + room) if from_zero else Scale(low - room, high + room)
    room = 0.0 if from_zero else 0.04 * (high - low)
    return Scale(low - room, high + room)


def percent(part: float) -> str:
    """A place as css has it."""
    return f"{100 * part:.4g}%"


def path_of(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
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


def _picture(grid: str, paths: Sequence[Markup], words: str) -> Markup:
    """A picture of paths over a grid.

    Args:
        words: those for whoever hears the page.
    """
    sizes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none"}
    return tag("svg", tag("path", class_="grid", d=grid), *paths, **sizes, role="img", aria_label=words)


NUM_COLOURS = 8
"""Jobs that each have a colour and a label; of more the best alone stands out."""
MAX_PLOT_POINTS = 12_000
"""Points of all curves of a picture."""
MIN_POINTS, MOST_POINTS = 40, 200
LABEL_ROOM = 0.075
"""Part of a picture's height that a label takes."""
NAMES = {"step": "steps", "tokens": "tokens", "train_s": "seconds of training"}
SHORT_NAMES = {"step": "steps", "tokens": "tokens", "train_s": "time"}
LOSSES = {"val": "validation loss", "train": "training loss"}
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
        finite = [point for point in self.points if math.isfinite(point[1])]
        return finite[-1] if finite else (math.nan, math.nan)

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
        return shortened(names_of([row.job for row in self.rows]), 60)


def loss_section(report: Report) -> Markup:
    """The section of the page; empty where no job has left a curve."""
    plots, kinds, axes = [], {}, {}
    for kind, name in LOSSES.items():
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
    start = FIRST_PART * x.high if max(len(line.points) for line in lines) >= MIN_CUT_POINTS else 0.0
    well = [line for line in lines if any(row in report.ranked for row in line.rows)]
    y = scale_of(losses, usual=[point[1] for line in well for point in line.points if point[0] >= start])
    best = report.ranked[0] if report.ranked else None
    num = sum(len(line.rows) for line in lines)
    are_few = len(lines) <= NUM_COLOURS
    ordered = sorted(lines, key=lambda line: best is not None and best in line.rows)
    paths = [_path(report, line, x, y, "best" if best in line.rows else "other", are_few=are_few) for line in ordered]
    jobs = f"{num} {'jobs' if num > 1 else 'job'}"
    words = f"The {LOSSES[kind]} of {jobs} over {NAMES[axis]}, from {y.low:.3g} to {y.high:.3g}."
    grid = "".join(f"M0 {round(HEIGHT * (1 - y.part(tick)))}h{WIDTH}" for tick in y.ticks())
    picture = _picture(grid, paths, words)
    y_labels = [tag("span", in_short(tick), style=f"top:{percent(1 - y.part(tick))}") for tick in y.ticks()]
    places = [(x.part(tick), in_short(tick)) for tick in x.ticks()]
    x_labels = [
        tag("span", words, style=f"left:{percent(part)}", class_="last" if part > 0.95 else None)
        for part, words in places
    ]
    lost = [_lost_mark(line, x, y, are_few=are_few) for line in lines if line.is_lost] if len(lines) <= 40 else []
    labelled = lines if are_few else [line for line in lines if best is not None and best in line.rows]
    notes = [f"{LOSSES[kind].capitalize()} over {NAMES[axis]}."]
    notes += ["\N{MULTIPLICATION SIGN} is where a loss became nan or infinite."] if lost else []
    notes += [f"Losses above {y.high:.3g} are cut off."] if max(losses, default=0.0) > y.high else []
    notes += (
        []
        if are_few
        else [f"{num} jobs; the best has the colour. Point at a row of the table, or choose it, to see its curve."]
    )
    frame = tag(
        "div",
        tag("div", *y_labels, class_="left"),
        tag("div", picture, *lost, class_="picture"),
        _ends(report, labelled, y, are_few=are_few) if num > 1 else "",
        tag("div", *x_labels, class_="below"),
        class_="frame alone" if num == 1 else "frame" if are_few else "frame many",
    )
    return tag("figure", frame, tag("figcaption", " ".join(notes)), class_="plot", data_kind=kind, data_x=axis)


def _lines(rows: Sequence[Row], curves: Sequence[Curve], axis: str) -> list[_CurveLine]:
    """The curves that have points, equal ones together."""
    most = max(MIN_POINTS, min(MOST_POINTS, MAX_PLOT_POINTS // max(1, len(rows))))
    by_points: dict[str, _CurveLine] = {}
    for place, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        points = curve.over(axis, most)
        if any(math.isfinite(loss) for _, loss in points):
            by_points.setdefault(repr(points), _CurveLine([], place, points)).rows.append(row)
    return list(by_points.values())


def _path(report: Report, line: _CurveLine, x: Scale, y: Scale, role: str, *, are_few: bool) -> Markup:
    words = f"job {line.names}: {report.label(*line.rows)} {line.end[1]:.4f}"
    path = path_of(line.points, x, y)
    style = f"c{line.place % NUM_COLOURS}" if are_few else role
    curve = tag("path", tag("title", words), class_=style, d=path, data_j=line.place)
    if len(line.points) > 12 or not are_few:
        return curve
    dots = "".join(f"{path_of([point], x, y)}h0" for point in line.points if math.isfinite(point[1]))
    return joined([curve, tag("path", class_=f"dots {style}", d=dots)])


def _lost_mark(line: _CurveLine, x: Scale, y: Scale, *, are_few: bool) -> Markup:
    across, top = x.part(line.end[0]), min(1.0, max(0.0, 1 - y.part(line.end[1])))
    style = f"c{line.place % NUM_COLOURS}" if are_few else "other"
    place = f"left:{percent(across)};top:{percent(top)}"
    return tag("b", "\N{MULTIPLICATION SIGN}", class_=f"lost {style}", style=place, aria_hidden="true")


def _ends(report: Report, lines: Sequence[_CurveLine], y: Scale, *, are_few: bool) -> Markup:
    """A label at the end of each line, moved so that none covers another."""
    pairs = [(min(1.0, max(0.0, 1 - y.part(line.end[1]))), line) for line in lines]
    placed = sorted(pairs, key=lambda pair: pair[0])
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


# Parallel coordinates: a line for each job through its settings to its loss, and what each setting explains.


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
        steps = [
            f"{round(WIDTH * place / (len(heights) - 1))} {round(HEIGHT * (1 - height))}"
            for place, height in enumerate(heights)
        ]
        title = tag("title", f"job {row.job}: {row[report.loss]:.4f}")
        style = "best" if row in best else "other"
        lines.append(tag("path", title, class_=style, d=f"M{'L'.join(steps)}", data_j=report.rows.index(row)))
    words = f"{len(rows)} jobs, each a line through {', '.join(axis.name for axis in axes)}."
    bars = "".join(f"M{round(WIDTH * place / (len(axes) - 1))} 0v{HEIGHT}" for place in range(len(axes)))
    picture = _picture(bars, lines, words)
    heads = [_axis_head(axis, place / (len(axes) - 1)) for place, axis in enumerate(axes)]
    figure = tag("div", tag("div", *heads, class_="heads"), tag("div", picture, class_="picture"), class_="frame")
    region = tag("div", figure, class_="scroll", tabindex="0", role="region", aria_label="Settings and loss")
    note = (
        f"The best {len(best)} of {len(rows)} completed jobs have the colour. A percentage is the part of the variance "
        "of the loss that the setting alone explains among these jobs; it says nothing of settings together."
    )
    body = tag("figure", region, tag("figcaption", note), class_="parallel", style=f"--axes:{len(axes)}")
    return tag("section", tag("h2", "Settings and loss"), body, id="parallel")


def _axis_of(name: str, short: str, values: Sequence[Any], part: float | None) -> Axis:
    about = "" if part is None else f"explains {part:.0%}"
    different = sorted_values(list(values))
    if len(different) > MOST_VALUES and all(map(is_number, different)):
        low, high = float(different[0]), float(different[-1])
        bends = math.log if low > 0 and high / low > 50 else float
        scale = scale_of(bends(value) for value in different)
        places = {repr(value): scale.part(bends(value)) for value in different}
        ends = (different[0], different[len(different) // 2], different[-1])
        return Axis(short, about, places, [(places[repr(value)], in_short(value)) for value in ends])
    steps = max(1, len(different) - 1)
    places = {repr(value): (place + 0.5 * (len(different) == 1)) / steps for place, value in enumerate(different)}
    tick_values = different if len(different) <= MOST_VALUES else [different[0], different[-1]]
    return Axis(short, about, places, [(places[repr(value)], value_text(name, value)) for value in tick_values])


def _axis_head(axis: Axis, place: float) -> Markup:
    ticks = [tag("span", words, style=f"top:{percent(1 - part)}") for part, words in axis.ticks]
    about = tag("small", axis.about) if axis.about else ""
    name = tag("b", axis.name, hidden(": ") if about else "", about)
    return tag("div", name, tag("div", *ticks, class_="ticks"), style=f"left:{percent(place)}")
