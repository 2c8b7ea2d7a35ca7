"""Outcomes of the jobs: causes of those that did not complete, groups of equal weights, the spread over seeds."""

import re

from zerotrain.report.groups import equal_weights, spreads
from zerotrain.report.page.markup import Markup, hash_of, letter_of, mark_of, names_of, tag
from zerotrain.report.rows import Report, Row, short_names, value_text

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
        who = f"job{'s' * (len(rows) > 1)} {names_of([row.job for row in rows])}"
        [first, *others] = rows
        lead = f"Alone, job {first.job}:" if others else "Alone:"
        items.append(
            tag(
                "li",
                tag("h3", mark_of(status), f"{who} {status}"),
                tag("p", words, class_="cause") if words else "",
                tag("p", tag("span", f"{lead} ", class_="lead"), tag("code", first.command), class_="command"),
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
            tag("b", letter_of(place)),
            f" {len(rows)} jobs: {names_of([row.job for row in rows])} ",
            hash_of(sha256),
        )
        for place, (sha256, rows) in enumerate(list(shared.items())[:MAX_GROUPS])
    ]
    more = len(shared) - MAX_GROUPS
    last = tag("p", f"{more} more groups are in the table.", class_="note") if more > 0 else ""
    head = tag("h2", "Same weights")
    return tag("section", head, tag("p", lead), tag("ul", *items, class_="groups") if items else "", last, id="weights")


def seeds_section(report: Report) -> Markup:
    """Mean and spread over jobs that differ in the seed alone."""
    found, short = spreads(report), short_names(report.settings)
    if not found:
        return Markup()
    rows = []
    for each in found[:MAX_GROUPS]:
        settings = {name: value for name, value in each.rows[0].settings.items() if name != "seed"}
        label = " ".join(f"{short[name]}={value_text(name, value)}" for name, value in settings.items()) or "all"
        jobs = names_of([row.job for row in each.rows])
        numbers = (
            f"{each.mean:.4f}",
            f"\N{PLUS-MINUS SIGN} {each.deviation:.4f}",
            f"{each.least:.4f}",
            f"{each.most:.4f}",
        )
        cells = [tag("td", number, class_="n") for number in numbers]
        rows.append(tag("tr", tag("th", label, scope="row"), tag("td", jobs), *cells))
    names = ("settings", "jobs", "mean", "deviation", "least", "most")
    heads = [tag("th", name, scope="col", class_="n" if place > 1 else None) for place, name in enumerate(names)]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    region = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Spread over seeds")
    more = len(found) - MAX_GROUPS
    words = "Jobs that differ in the seed alone; the deviation is that of the sample."
    words += f" {more} more groups are in sweep.json." if more > 0 else ""
    return tag("section", tag("h2", "Over seeds"), region, tag("p", words, class_="note"), id="seeds")
