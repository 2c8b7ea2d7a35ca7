"""The page of a report: what the template page.html shows of the jobs."""

import re
import time
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from zerotrain.files.untrusted import printable
from zerotrain.report import plots
from zerotrain.report.rows import FIGURES, KINDS, Report, Row, equal_weights, jobs_named, names_of, spreads
from zerotrain.report.values import in_bytes, is_number, short_names, value_text

HEAD = b"<!doctype html>\n<!-- zerotrain report -->"
"""Begins each page; a file with another begin is somebody's."""
MAX_SETTINGS = 8
"""Columns of settings; the csv has all."""
NUM_IN_ORDER = 20
"""So many jobs stand in their own order; of more the best come first."""
MAX_GROUPS = 12
MAX_TEXT = 2000


@cache
def _template() -> Any:
    """The template. It escapes whatever it shows, and makes it printable."""
    import jinja2  # torch needs it too, and no run

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_escape_unprintable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (is_number, jobs_named, names_of, value_text)
    environment.globals |= {function.__name__: function for function in functions}
    return environment.get_template("page.html")


def _escape_unprintable(value: Any) -> Any:
    """A text as it is to be read; what the template has made is html already."""
    return printable(value, MAX_TEXT, keep="") if isinstance(value, str) and not hasattr(value, "__html__") else value


def page_of(report: Report) -> bytes:
    """The whole page, as it is written."""
    groups = equal_weights(report.rows)
    shared = [sha256 for sha256, rows in groups.items() if len(rows) > 1]
    names = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)))
    html = _template().render(
        report=report,
        short=short_names(report.settings),
        headlines=_headlines(report),
        losses=plots.loss_plots(report),
        curves=plots.curves_of(report),
        written_ms=1000 * time.time(),
        plots=plots,
        jobs=_jobs_table(report),
        causes=_causes(report),
        parallel=plots.parallel(report),
        spreads=spreads(report),
        charts=plots.bar_charts(report),
        groups=groups,
        letters=dict(zip(shared, names, strict=False)),
        max_groups=MAX_GROUPS,
        max_settings=MAX_SETTINGS,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    # No text out of a file has a line break: those between elements are the template's.
    return HEAD + b"\n" + re.sub(r">\s*\n\s*<", "><", html).encode() + b"\n"


def _headlines(report: Report) -> list[tuple[str, str, str]]:
    """(name, number, words) of the best job of each kind; of one run alone its own."""
    if len(report.rows) == 1:
        return _headlines_of_run(report.rows[0])
    headlines = []
    if report.ranked:
        loss = f"{report.loss_of(report.ranked[0]):.4f}"
        headlines.append((f"Best {report.loss_name}", loss, _job_words(report, report.ranked[0])))
    for name, figure in FIGURES.items():
        numbers = [(figure.better * value, row) for row in report.ranked if (value := row[name])]
        if figure.headline and numbers:
            value, row = max(numbers, key=lambda pair: pair[0])
            headlines.append((figure.headline, figure.form(abs(value)), _job_words(report, row)))
    groups = equal_weights(report.rows)
    num = sum(map(len, groups.values()))
    [sha256, rows] = next(iter(groups.items()), ("", []))
    if len(rows) > 1 and 2 * len(rows) >= num:
        headlines.append(("Same weights", f"{len(rows)} of {num} jobs", f"sha256 {sha256[:12]}"))
    return headlines


def _headlines_of_run(row: Row) -> list[tuple[str, str, str]]:
    val, train, theory = row["final_val_loss"], row["final_train_loss"], row["theory_sent_nbytes"]
    held = sum(row[f"theory_{kind}_nbytes"] or 0.0 for kind in KINDS)
    candidates = [
        ("Validation loss", "final_val_loss", "" if train is None else f"training loss {train:.4f}"),
        ("Training loss", "final_train_loss" if val is None else "", ""),
        ("Tokens/s", "tokens_per_s", f"{row['steps'] or 0:,.0f} steps"),
        ("Memory held", "held_nbytes", f"theory {in_bytes(held)}" if held else ""),
        ("Sent per step", "sent_nbytes", f"theory {in_bytes(theory)}" if theory else ""),
    ]
    return [
        (title, FIGURES[name].form(value), words)
        for title, name, words in candidates
        if name and (value := row[name]) is not None
    ]


def _job_words(report: Report, row: Row) -> str:
    label = report.label(row)
    return f"job {row.job}{', ' if label else ''}{label}"


def _jobs_table(report: Report) -> dict[str, Any]:
    """The rows of the table in their order, or of many the best first; its columns, and what rows are compared by."""
    compares = len(report.ranked) > 1
    by_loss = compares and len(report.rows) > NUM_IN_ORDER
    rows = [*report.ranked, *(row for row in report.rows if row not in report.ranked)] if by_loss else report.rows
    is_known = {name: any(row[name] is not None for row in rows) for name in FIGURES}
    columns = {name: figure for name, figure in FIGURES.items() if figure.head and is_known[name]}
    if "tokens_per_s" in columns:
        columns.pop("samples_per_s", None)
    best = {}
    for name, figure in columns.items():
        values = [value for row in report.ranked if (value := row[name]) is not None]
        if compares and figure.better and values:
            top = max(values) if figure.better > 0 else min(values)
            if 2 * values.count(top) < len(values):  # no number is the best that half of the jobs have
                best[name] = top
    loss = report.loss if report.loss in columns else "final_val_loss"  # it stands beside the job: a phone shows it
    return {
        "rows": rows,
        "first": {name: figure for name, figure in columns.items() if name == loss},
        "columns": {name: figure for name, figure in columns.items() if name != loss},
        "reference": next((row for row in rows if row in report.ranked), None) if compares else None,
        "best": best,
        "sorted_by": report.loss if by_loss else "",
    }


def _causes(report: Report) -> list[tuple[str, list[Row]]]:
    """Why jobs did not complete, and which jobs; causes that differ in numbers alone are one."""
    unknown = {"running": "", "unfinished": "it has left no result"}
    causes: dict[tuple[str, str], tuple[str, list[Row]]] = {}
    for row in report.rows:
        if row.status != "completed":
            words = row.error or unknown.get(row.status, "the loss became nan or infinite")
            causes.setdefault((row.status, re.sub(r"\d+", "0", words)), (words, []))[1].append(row)
    return list(causes.values())
