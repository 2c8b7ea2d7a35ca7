"""Bars: the memory of a rank and the bytes that it sends, beside the theory, and the parts of a step's time."""

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.report.page.markup import Markup, joined, names_of, tag
from zerotrain.report.rows import KINDS, Report, Row
from zerotrain.report.values import in_bytes

MAX_BARS = 12
WIDTH = 1000
NEAR = 0.005
"""Parts by which a measured number may differ from the theory and still be told as equal."""

_TIMES = (("k1", "comm_wait_ms", "communication"), ("k2", "update_ms", "update"), ("k3", "data_wait_ms", "data"))
"""(class of the colour, column, name) of the parts of a step but the first, its compute."""

_TOLD_APART = (
    "Median of the steps of rank 0, and the mean of its parts. Communication is waiting for other ranks, which hides "
    "behind nothing."
)
_NOT_TOLD_APART = (
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
        return f"job{'s' * (num > 1)} {names_of([row.job for row in self.rows])}"


def memory_section(report: Report) -> Markup:
    """Bytes that rank 0 holds at rest, by kind, beside the theory."""
    found: list[Bar] = []
    for rows in _equal(report.rows, [f"{prefix}{kind}_nbytes" for prefix in ("", "theory_") for kind in KINDS]):
        held = [(f"k{place}", rows[0][f"{kind}_nbytes"] or 0.0) for place, kind in enumerate(KINDS)]
        theory = [(f"k{place}", rows[0][f"theory_{kind}_nbytes"] or 0.0) for place, kind in enumerate(KINDS)]
        words = _beside(sum(size for _, size in held), sum(size for _, size in theory))
        if peaks := [nbytes for row in rows if (nbytes := row["peak_nbytes"])]:
            words += f", peak {in_bytes(max(peaks))}"
        found.append(Bar(rows=rows, parts=held, theory=theory, words=words))
    used = [place for place in range(len(KINDS)) if any(bar.parts[place][1] for bar in found)]
    legend = [(f"k{place}", KINDS[place]) for place in used]
    note = (
        "Held by rank 0 between steps; the thin bar is the theory. The peak is that of the process, without libraries."
    )
    return _section(report, "memory", "Memory", found, legend, note)


def sent_section(report: Report) -> Markup:
    """Bytes that rank 0 sends in a step, beside the theory."""
    found = []
    for rows in _equal(report.rows, ["sent_nbytes", "theory_sent_nbytes"]):
        sent, theory = rows[0]["sent_nbytes"] or 0.0, rows[0]["theory_sent_nbytes"] or 0.0
        found.append(Bar(rows=rows, parts=[("k0", sent)], theory=[("k0", theory)], words=_beside(sent, theory)))
    found = found if any(bar.parts[0][1] for bar in found) else []
    return _section(
        report, "sent", "Sent in a step", found, [], "By rank 0 in the last step; the thin bar is the theory."
    )


def time_section(report: Report) -> Markup:
    """The time of a step, by its parts."""
    found = []
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
        found.append(Bar(rows=[row], parts=[("k0", left_ms), *parts], theory=[], words=words))
    is_split = any(row["comm_wait_ms"] is not None for row in rows)
    note = _TOLD_APART if is_split else _NOT_TOLD_APART
    note += " The best jobs come first." if len(rows) > MAX_BARS else ""
    used = {style for bar in found for style, size in bar.parts if size}
    legend = [("k0", "compute" if is_split else "compute, communication, update")]
    legend += [(style, what) for style, _, what in _TIMES if style in used]
    return _section(report, "time", "Time of a step", found, legend, note)


def _equal(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """The rows that have any of these numbers, equal ones together."""
    found: dict[tuple[float | None, ...], list[Row]] = {}
    for row in rows:
        values = tuple(row[name] for name in names)
        if any(values):
            found.setdefault(values, []).append(row)
    return list(found.values())


def _beside(measured: float, theory: float) -> str:
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
            tag("span", _drawn(bar.parts, largest), _drawn(bar.theory, largest, "theory"), class_="pair"),
        )
        for bar in bars[:MAX_BARS]
    ]
    if len(bars) > MAX_BARS:
        note += f" {len(bars) - MAX_BARS} more bars are left out."
    keys = tag("p", *(tag("span", tag("i", class_=style), words) for style, words in legend), class_="legend")
    parts = [tag("h2", title), keys if legend else "", tag("ul", *items, class_="bars"), tag("p", note, class_="note")]
    return tag("section", *parts, id=key)


def _drawn(parts: Sequence[tuple[str, float]], largest: float, kind: str = "") -> Markup:
    if not any(size for _, size in parts):
        return Markup()
    rects, left = [], 0.0
    for style, size in parts:
        width = WIDTH * size / largest if largest else 0.0
        if width:
            rects.append(tag("rect", x=round(left, 1), width=round(width, 1), height=10, class_=style))
        left += width
    view = f"0 0 {WIDTH} 10"
    return tag("svg", joined(rects), viewBox=view, preserveAspectRatio="none", class_=kind or None, aria_hidden="true")
