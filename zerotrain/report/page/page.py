"""The page: its head, what matters most, and the sections one after the other."""

import time
from collections.abc import Callable
from pathlib import Path

from zerotrain.report.groups import equal_weights
from zerotrain.report.page.bars import memory_section, sent_section, time_section
from zerotrain.report.page.jobs import held, jobs_section
from zerotrain.report.page.loss import loss_section
from zerotrain.report.page.markup import Markup, mark_of, tag
from zerotrain.report.page.outcomes import failed_section, seeds_section, weights_section
from zerotrain.report.page.parallel import parallel_section
from zerotrain.report.rows import KINDS, Report, Row
from zerotrain.report.values import in_bytes

HEAD = b"<!doctype html>\n<!-- zerotrain report -->"
"""Begins each page; a file that begins otherwise is somebody's."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Lets a browser load nothing, whatever the page may hold."""


def page_of(report: Report) -> bytes:
    """The whole page, as it is written."""
    num = len(report.rows)
    title = f"{report.title}: {num} job{'s' * (num != 1)}"
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
        loss_section(report),
        jobs_section(report),
        failed_section(report),
        parallel_section(report),
        seeds_section(report),
        tag(
            "div",
            memory_section(report),
            sent_section(report),
            time_section(report),
            weights_section(report),
            class_="pairs",
        ),
        _command(report) if num == 1 else "",
    ]
    body = tag("body", tag("main", _top(report), *sections, _foot()), tag("script", _own("page.js")))
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
    found = []
    if report.ranked:
        best = report.ranked[0]
        found.append((f"Best {report.loss_name}", f"{best[report.loss]:.4f}", _of(report, best)))
    for title, value, sign, shown in _KINDS:
        known = [row for row in report.ranked if value(row)]
        if known:
            best = max(known, key=lambda row: sign * (value(row) or 0.0))
            found.append((title, shown(value(best) or 0.0), _of(report, best)))
    groups = equal_weights(report.rows)
    num = sum(map(len, groups.values()))
    [sha256, equal] = next(iter(groups.items()), ("", []))
    if len(equal) > 1 and 2 * len(equal) >= num:
        found.append(("Same weights", f"{len(equal)} of {num} jobs", f"sha256 {sha256[:12]}"))
    return found


def _figures_of(row: Row) -> list[tuple[str, str, str]]:
    val, train, theory = row["final_val_loss"], row["final_train_loss"], row["theory_sent_nbytes"]
    by_kind = [row[f"theory_{kind}_nbytes"] or 0.0 for kind in KINDS]
    told: list[tuple[str, float | None, Callable[[float], str], str]] = [
        ("Validation loss", val, "{:.4f}".format, f"training loss {train:.4f}" if train is not None else ""),
        ("Training loss", train if val is None else None, "{:.4f}".format, ""),
        ("Tokens/s", row["tokens_per_s"], "{:,.0f}".format, f"{row['steps'] or 0:,.0f} steps"),
        ("Memory held", held(row), in_bytes, f"theory {in_bytes(sum(by_kind))}" if any(by_kind) else ""),
        ("Sent per step", row["sent_nbytes"], in_bytes, f"theory {in_bytes(theory)}" if theory else ""),
    ]
    return [(name, shown(value), words) for name, value, shown, words in told if value is not None]


_KINDS: tuple[tuple[str, Callable[[Row], float | None], int, Callable[[float], str]], ...] = (
    ("Most tokens/s", lambda row: row["tokens_per_s"], 1, "{:,.0f}".format),
    ("Least memory held", held, -1, in_bytes),
    ("Least sent per step", lambda row: row["sent_nbytes"], -1, in_bytes),
)


def _of(report: Report, row: Row) -> str:
    label = report.label(row)
    return f"job {row.job}{', ' if label else ''}{label}"


def _command(report: Report) -> Markup:
    """The command of a run, if it is one alone."""
    [row] = report.rows
    return tag("section", tag("h2", "Command"), tag("p", tag("code", row.command), class_="command"), id="command")


def _foot() -> Markup:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return tag("footer", f"Written {written} by zerotrain. The same rows are in sweep.csv and sweep.json.")


def _own(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))
