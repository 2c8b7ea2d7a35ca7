"""The page of a report: the table of the jobs, in which one row is 1.00, their outcomes, and the plots."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain.report import plots
from zerotrain.report.plots import Markup, hidden, mark_of, tag
from zerotrain.report.rows import KINDS, Report, Row, equal_weights, is_number, short_names, spreads, value_text
from zerotrain.report.values import in_bytes

DASH = "\N{EN DASH}"
MAX_SETTINGS = 8
"""Columns of settings; the csv has all."""
NUM_IN_ORDER = 20
"""Jobs that stand in their own order; of more the best come first."""


@dataclass(frozen=True)
class JobColumn:
    """A column of numbers."""

    head: str
    value: Callable[[Row], float | None]
    form: Callable[[float], str]
    better: int = 0
    """-1: the least is the best; 1: the most is; 0: none is."""


def held(row: Row) -> float | None:
    """Bytes that rank 0 holds at rest."""
    sizes = [nbytes for kind in KINDS if (nbytes := row[f"{kind}_nbytes"]) is not None]
    return sum(sizes) if sizes else None


_LOSS, _COUNT = "{:.4f}".format, "{:,.0f}".format
COLUMNS = {
    "final_val_loss": JobColumn("val loss", lambda row: row["final_val_loss"], _LOSS, -1),
    "final_train_loss": JobColumn("train loss", lambda row: row["final_train_loss"], _LOSS),
    "tokens_per_s": JobColumn("tokens/s", lambda row: row["tokens_per_s"], _COUNT, 1),
    "samples_per_s": JobColumn("samples/s", lambda row: row["samples_per_s"], _COUNT, 1),
    "step_ms_median": JobColumn("ms/step", lambda row: row["step_ms_median"], "{:,.1f}".format, -1),
    "held": JobColumn("memory", held, in_bytes, -1),
    "peak_nbytes": JobColumn("peak", lambda row: row["peak_nbytes"], in_bytes),
    "sent_nbytes": JobColumn("sent/step", lambda row: row["sent_nbytes"], in_bytes, -1),
}


def jobs_section(report: Report) -> Markup:
    """The table of all jobs: in their order, or of many the best first."""
    by_loss = len(report.rows) > NUM_IN_ORDER and len(report.ranked) > 1
    unranked = [row for row in report.rows if row not in report.ranked]
    table = _Table(report=report, rows=[*report.ranked, *unranked] if by_loss else report.rows)
    sorted_by = COLUMNS.get(report.loss) if by_loss else None
    notes = ["\N{BLACK STAR} is the best job; the best number of a column has the colour."] if table.compares else []
    notes += ["Small numbers are ratios to the row that is 1.00."] if table.compares else []
    num_hidden = len(report.settings) - MAX_SETTINGS
    notes += [f"{num_hidden} more settings that differ are in sweep.csv."] if num_hidden > 0 else []
    inner = tag("table", tag("thead", table.heads(sorted_by)), tag("tbody", *map(table.line, table.rows)))
    region = tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label="Table of the jobs")
    title = "Jobs" if len(report.rows) > 1 else "Run"
    return tag(
        "section", tag("h2", title), region, tag("p", " ".join(notes), class_="note") if notes else "", id="jobs"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Table:
    """The rows of the table, and what they have in common."""

    report: Report
    rows: list[Row]
    """In the order of the table."""

    @cached_property
    def columns(self) -> list[JobColumn]:
        """The columns of numbers of which anything is known."""
        rows = self.rows
        names = [name for name, column in COLUMNS.items() if any(column.value(row) is not None for row in rows)]
        return [COLUMNS[name] for name in names if name != "samples_per_s" or "tokens_per_s" not in names]

    @cached_property
    def settings(self) -> list[str]:
        return self.report.settings[:MAX_SETTINGS]

    @cached_property
    def compares(self) -> bool:
        """Whether there are two jobs to compare."""
        return len(self.report.ranked) > 1

    @cached_property
    def reference(self) -> Row | None:
        """The row that is 1.00 at first."""
        return next((row for row in self.rows if row in self.report.ranked), None) if self.compares else None

    @cached_property
    def best(self) -> dict[str, float | None]:
        """The best number of each column, by its head."""
        return {column.head: _best(column, self.report) if self.compares else None for column in self.columns}

    @cached_property
    def shared(self) -> list[str]:
        """The sha256 of weights that more than one job has."""
        return [sha256 for sha256, rows in equal_weights(self.report.rows).items() if len(rows) > 1]

    @cached_property
    def has_weights(self) -> bool:
        return any(row.weights_sha256 for row in self.rows)

    @cached_property
    def places(self) -> dict[int, int]:
        """The number of each row in the report, by its id: its curve has the same."""
        return {id(row): place for place, row in enumerate(self.report.rows)}

    def heads(self, sorted_by: JobColumn | None) -> Markup:
        """The line of heads, each a button that sorts."""
        short = short_names(self.report.settings)
        pick = tag("th", hidden("the row that is 1.00"), "1.00", scope="col", class_="pick") if self.compares else ""
        of_settings = [_head(short[name], path=name) for name in self.settings]
        numbers = [_head(column.head, is_number=True, is_sorted=column is sorted_by) for column in self.columns]
        weights = [_head("weights")] if self.has_weights else []
        return tag("tr", pick, _head("job"), *of_settings, _head("status"), *numbers, *weights)

    def line(self, row: Row) -> Markup:
        """The cells of a job."""
        is_best = self.compares and row is self.report.ranked[0]
        name = tag(
            "th", row.job, tag("b", " \N{BLACK STAR}", hidden("best")) if is_best else "", scope="row", title=row.job
        )
        settings = [_setting(setting, row.settings) for setting in self.settings]
        numbers = [_number(column, row, self.reference, self.best[column.head]) for column in self.columns]
        weights = _weights(row, self.shared) if self.has_weights else ""
        style = "best" if is_best else None if row.status == "completed" else "off"
        place = self.places[id(row)]
        pick = Markup()
        if self.compares:
            checked, words = row is self.reference, f"job {row.job} is 1.00"
            button = tag("input", type="radio", name="reference", value=str(place), checked=checked, aria_label=words)
            pick = tag("td", button, class_="pick")
        status = tag("td", mark_of(row.status), row.status, class_=f"status {row.status}")
        return tag("tr", pick, name, *settings, status, *numbers, weights, data_j=place, class_=style)


def _head(words: str, *, path: str = "", is_number: bool = False, is_sorted: bool = False) -> Markup:
    group = path.removesuffix(words) if path.endswith(words) else ""
    inner = [tag("small", group)] if group else []
    button = tag("button", *inner, words, type="button", title=path or None)
    order = "ascending" if is_sorted else None
    return tag("th", button, scope="col", class_="n" if is_number else None, aria_sort=order)


def _setting(name: str, settings: Mapping[str, Any]) -> Markup:
    if name not in settings:
        return tag("td", DASH)
    value = settings[name]
    numeric = float(value) if is_number(value) else None
    return tag("td", value_text(name, value), class_="n" if numeric is not None else None, data_v=numeric)


def _number(column: JobColumn, row: Row, reference: Row | None, best: float | None) -> Markup:
    value = column.value(row)
    if value is None:
        return tag("td", DASH, class_="n")
    base = None if reference is None or not column.better else column.value(reference)
    ratio = "" if base is None else tag("i", f"{value / base:.2f}" if base else "")
    style = "n top" if best is not None and value == best and row.status == "completed" else "n"
    return tag("td", column.form(value), ratio, class_=style, data_v=value)


def _best(column: JobColumn, report: Report) -> float | None:
    """The best value of a column; None where half of the jobs have it."""
    values = [value for row in report.ranked if (value := column.value(row)) is not None]
    if not column.better or not values:
        return None
    best = max(values) if column.better > 0 else min(values)
    return best if 2 * values.count(best) < len(values) else None


def _weights(row: Row, shared: Sequence[str]) -> Markup:
    if row.weights_sha256 is None:
        return tag("td", DASH)
    letter = tag("b", plots.letter_of(shared.index(row.weights_sha256))) if row.weights_sha256 in shared else ""
    return tag("td", plots.hash_of(row.weights_sha256), letter, class_="weights")


# Outcomes of the jobs: causes of those that did not complete, groups of equal weights, the spread over seeds.


MAX_GROUPS = 12


def failed_section(report: Report) -> Markup:
    """The causes of jobs that did not complete, those that differ in numbers alone together; and a command for one."""
    causes: dict[tuple[str, str], list[Row]] = {}
    words_of: dict[tuple[str, str], str] = {}
    for row in report.rows:
        if row.status != "completed":
            unknown = "it has left no result" if row.status == "unfinished" else "the loss became nan or infinite"
            words = row.error or ("" if row.status == "running" else unknown)
            cause = row.status, re.sub(r"\d+", "0", words)
            causes.setdefault(cause, []).append(row)
            words_of.setdefault(cause, words)
    items = []
    for cause, rows in causes.items():
        status, words = cause[0], words_of[cause]
        who = f"{'jobs' if len(rows) > 1 else 'job'} {plots.names_of([row.job for row in rows])}"
        [example, *rest] = rows
        lead = f"Alone, job {example.job}:" if rest else "Alone:"
        items.append(
            tag(
                "li",
                tag("h3", mark_of(status), f"{who} {status}"),
                tag("p", words, class_="cause") if words else "",
                tag("p", tag("span", f"{lead} ", class_="lead"), tag("code", example.command), class_="command"),
            )
        )
    return tag("section", tag("h2", "Not completed"), tag("ul", *items), id="failed") if items else Markup()


def weights_section(report: Report) -> Markup:
    """Groups of jobs with the same weights, bit for bit."""
    groups = equal_weights(report.rows)
    num = sum(map(len, groups.values()))
    shared = {sha256: rows for sha256, rows in groups.items() if len(rows) > 1}
    if num < 2:
        return Markup()
    if len(groups) == 1:
        [sha256] = groups
        words = tag(
            "p", tag("b", f"All {num}"), " jobs with weights have the same ones, bit for bit: ", tag("code", sha256)
        )
        return tag("section", tag("h2", "Same weights"), words, id="weights")
    alone = num - sum(map(len, shared.values()))
    lead = f"{num} jobs have {len(groups)} different weights, bit for bit; {alone} share theirs with no other job."
    lead = lead if shared else f"No two of {num} jobs have the same weights."
    items = [
        tag(
            "li",
            tag("b", plots.letter_of(place)),
            f" {len(rows)} jobs: {plots.names_of([row.job for row in rows])} ",
            plots.hash_of(sha256),
        )
        for place, (sha256, rows) in enumerate(list(shared.items())[:MAX_GROUPS])
    ]
    num_hidden = len(shared) - MAX_GROUPS
    remark = tag("p", f"{num_hidden} more groups are in the table.", class_="note") if num_hidden > 0 else ""
    head = tag("h2", "Same weights")
    return tag(
        "section", head, tag("p", lead), tag("ul", *items, class_="groups") if items else "", remark, id="weights"
    )


def seeds_section(report: Report) -> Markup:
    """Mean and spread over jobs that differ in the seed alone."""
    groups, short = spreads(report), short_names(report.settings)
    if not groups:
        return Markup()
    rows = []
    for spread in groups[:MAX_GROUPS]:
        settings = {name: value for name, value in spread.rows[0].settings.items() if name != "seed"}
        label = " ".join(f"{short[name]}={value_text(name, value)}" for name, value in settings.items()) or "all"
        jobs = plots.names_of([row.job for row in spread.rows])
        deviation = f"\N{PLUS-MINUS SIGN} {_LOSS(spread.deviation)}"
        numbers = (_LOSS(spread.mean), deviation, _LOSS(spread.least), _LOSS(spread.most))
        cells = [tag("td", number, class_="n") for number in numbers]
        rows.append(tag("tr", tag("th", label, scope="row"), tag("td", jobs), *cells))
    names = ("settings", "jobs", "mean", "deviation", "least", "most")
    heads = [tag("th", name, scope="col", class_="n" if place > 1 else None) for place, name in enumerate(names)]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    region = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Spread over seeds")
    num_hidden = len(groups) - MAX_GROUPS
    words = "Jobs that differ in the seed alone; the deviation is that of the sample."
    words += f" {num_hidden} more groups are in sweep.json." if num_hidden > 0 else ""
    return tag("section", tag("h2", "Over seeds"), region, tag("p", words, class_="note"), id="seeds")


# The page: its head, what matters most, and the sections one after the other.


HEAD = b"<!doctype html>\n<!-- zerotrain report -->"
"""Begins each page; a file that begins otherwise is somebody's."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Lets a browser load nothing, whatever the page may hold."""


def page_of(report: Report) -> bytes:
    """The whole page, as it is written."""
    num = len(report.rows)
    title = f"{report.title}: {num} {'job' if num == 1 else 'jobs'}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _own("page.css")),
        tag("noscript", tag("style", Markup(".pick { display: none } thead button { cursor: auto }"))),
    )
    sections = [
        plots.loss_section(report),
        jobs_section(report),
        failed_section(report),
        plots.parallel_section(report),
        seeds_section(report),
        tag(
            "div",
            plots.memory_section(report),
            plots.sent_section(report),
            plots.time_section(report),
            weights_section(report),
            class_="pairs",
        ),
    ]
    if num == 1:
        command = tag("p", tag("code", report.rows[0].command), class_="command")
        sections.append(tag("section", tag("h2", "Command"), command, id="command"))
    timestamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    foot = tag("footer", f"Written {timestamp} by zerotrain. The same rows are in sweep.csv and sweep.json.")
    body = tag("body", tag("main", _top(report), *sections, foot), tag("script", _own("page.js")))
    return HEAD + f"\n{tag('html', head, body, lang='en')}\n".encode()


def _top(report: Report) -> Markup:
    """The title, how the jobs ended, and the numbers that are looked for first."""
    num = len(report.rows)
    kind = "Run" if num == 1 else "Sweep"
    counts = [tag("span", mark_of(status), f"{count} {status}") for status, count in report.counts.items()]
    link = tag("a", "why", href="#failed") if set(report.counts) - {"completed"} else ""
    figures = [
        tag("div", tag("dt", name), tag("dd", number), tag("dd", words, class_="of"))
        for name, number, words in _figures(report)
    ]
    return tag(
        "header",
        tag("p", kind, class_="kind"),
        tag("h1", report.title),
        tag("p", *counts, link, class_="counts"),
        tag("dl", *figures) if figures else "",
    )


def _figures(report: Report) -> list[tuple[str, str, str]]:
    """(name, number, of which job) of the best job of each kind; of one run alone its own."""
    if len(report.rows) == 1:
        return _figures_of(report.rows[0])
    figures = []
    if report.ranked:
        best = report.ranked[0]
        figures.append((f"Best {report.loss_name}", f"{best[report.loss]:.4f}", _job_words(report, best)))
    for title, value, sign, form in _KINDS:
        rows = [row for row in report.ranked if value(row)]
        if rows:
            best = max(rows, key=lambda row: sign * (value(row) or 0.0))
            figures.append((title, form(value(best) or 0.0), _job_words(report, best)))
    groups = equal_weights(report.rows)
    num = sum(map(len, groups.values()))
    [sha256, equal] = next(iter(groups.items()), ("", []))
    if len(equal) > 1 and 2 * len(equal) >= num:
        figures.append(("Same weights", f"{len(equal)} of {num} jobs", f"sha256 {sha256[:12]}"))
    return figures


def _figures_of(row: Row) -> list[tuple[str, str, str]]:
    val, train, theory = row["final_val_loss"], row["final_train_loss"], row["theory_sent_nbytes"]
    by_kind = [row[f"theory_{kind}_nbytes"] or 0.0 for kind in KINDS]
    candidates: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("Validation loss", val, _LOSS, f"training loss {train:.4f}" if train is not None else ""),
        ("Training loss", train if val is None else None, _LOSS, ""),
        ("Tokens/s", row["tokens_per_s"], _COUNT, f"{row['steps'] or 0:,.0f} steps"),
        ("Memory held", held(row), in_bytes, f"theory {in_bytes(sum(by_kind))}" if any(by_kind) else ""),
        ("Sent per step", row["sent_nbytes"], in_bytes, f"theory {in_bytes(theory)}" if theory else ""),
    ]
    return [(name, form(value), words) for name, value, form, words in candidates if value is not None]


_KINDS: tuple[tuple[str, Callable[[Row], float | None], int, Callable[[float], str]], ...] = (
    ("Most tokens/s", lambda row: row["tokens_per_s"], 1, _COUNT),
    ("Least memory held", held, -1, in_bytes),
    ("Least sent per step", lambda row: row["sent_nbytes"], -1, in_bytes),
)


def _job_words(report: Report, row: Row) -> str:
    label = report.label(row)
    return f"job {row.job}{', ' if label else ''}{label}"


def _own(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))
