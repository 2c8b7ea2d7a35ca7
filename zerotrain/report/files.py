"""sweep.csv, sweep.json and report.html, each written whole or not at all. They replace no file of somebody else's."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.errors import ConfigError
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import only_regular, printable
from zerotrain.report.page import HEAD, page_of
from zerotrain.report.rows import FIGURES, Report, Row, equal_weights, spreads
from zerotrain.report.values import short_names, with_short_numbers

CSV_NAME, JSON_NAME, PAGE_NAME = "sweep.csv", "sweep.json", "report.html"
HEADS = {CSV_NAME: b"job,folder,status,", JSON_NAME: b'{"report": "zerotrain"', PAGE_NAME: HEAD}
"""How each of our files begins."""
_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t")


def write_files(report: Report, out: Path) -> None:
    """Write the files of a report.

    Raises:
        ConfigError: a file of somebody else has the name of one.
        OSError: a file cannot be written.
    """
    for name, head in HEADS.items():
        try:
            with open(out / name, "rb", opener=only_regular) as file:
                start = file.read(len(head))
        except FileNotFoundError:
            continue
        except OSError:  # a folder, a FIFO, or a file that nobody may read
            start = b""
        require_ours(out / name, start, head)
    for name, content_of in zip(HEADS, (csv_of, json_of, page_of), strict=True):
        content = content_of(report)
        with whole(out / name) as file:
            file.write(content)


def csv_of(report: Report) -> bytes:
    """A line for each job. Text gets an apostrophe in front if a spreadsheet would take it for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    leading = ["job", "folder", "status"]
    trailing = [*(report.rows[0].figures if report.rows else ()), "weights_sha256", "config_hash", "error", "command"]
    # A setting of an edited config may have the name of another column, and readers would take it for that.
    settings = [f"config.{name}" if name in (*leading, *trailing) else name for name in report.settings]
    writer.writerow(map(_cell, [*leading, *settings, *trailing]))
    for body in (row_body(row, report) for row in report.rows):
        values = [*map(body.get, leading), *body["settings"].values(), *map(body.get, trailing)]
        writer.writerow(map(_cell, values))
    return text.getvalue().encode(errors="backslashreplace")


def json_of(report: Report) -> bytes:
    """The same rows as objects, the groups of equal weights, and the spread over seeds."""
    content = {
        "report": "zerotrain",
        "title": report.title,
        "loss": report.loss,
        "best": report.ranked[0].job if report.ranked else None,
        "settings": report.settings,
        "counts": report.counts,
        "weights": {sha256: [row.job for row in rows] for sha256, rows in equal_weights(report.rows).items()},
        "seeds": [
            {"jobs": [row.job for row in spread.rows]}
            | {name: getattr(spread, name) for name in ("mean", "deviation", "least", "most")}
            for spread in spreads(report)
        ],
        "jobs": [row_body(row, report) for row in report.rows],
    }
    return (json.dumps(content, allow_nan=False) + "\n").encode()


def row_body(row: Row, report: Report) -> dict[str, Any]:
    """A row as JSON has it: null is what is not known."""
    return {
        "job": row.job,
        "folder": printable(str(row.folder), keep=""),
        "status": row.status,
        "settings": {name: row.settings.get(name) for name in report.settings},
        **row.figures,
        "weights_sha256": row.weights_sha256,
        "config_hash": row.config_hash,
        "error": row.error,
        "command": row.command,
    }


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_STARTS_A_FORMULA) else value
    return "" if value is None else json.dumps(value)


def require_ours(place: object, start: bytes, head: bytes) -> None:
    """Make sure that a file that a report replaces is one of a report; nothing of a user's is erased.

    Args:
        place: its path or URL.
        start: its first bytes.
        head: the first bytes of a file of this name in a report.

    Raises:
        ConfigError: it is not.
    """
    if start != head:
        raise ConfigError(
            f"{place} is no report of zerotrain, and stays as it is; rename it, or give --out another folder"
        )


# The table of jobs in a terminal.


SHORT_HASH, TABLE_HASH = 12, 8
"""Characters of a sha256 in a line, and in the table."""
MAX_GROUPS = 4
OF_RANKS = "launch.nproc_per_node="


def print_table(report: Report, console: Console) -> None:
    """Print a row for each job, the errors of failed ones, and whether the weights agree."""
    rows = report.rows
    shared = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    ranks = ["-" if row["ranks"] is None else f"{row['ranks']:.0f}" for row in rows]
    overrides = [[with_short_numbers(word) for word in row.overrides if word not in shared] for row in rows]
    columns: dict[str, list[str]] = {"job": [row.job for row in rows], "overrides": []}
    if len({*ranks} - {"-"}) > 1:
        overrides = [[word for word in words if not word.startswith(OF_RANKS)] for words in overrides]
        columns["ranks"] = ranks
    columns["status"] = [row.status for row in rows]
    for name in ("final_val_loss", "tokens_per_s", "step_ms_median"):
        figure = FIGURES[name]
        columns[figure.head] = ["-" if (value := row[name]) is None else figure.form(value) for row in rows]
    columns["weights"] = [(row.weights_sha256 or "-")[:TABLE_HASH] for row in rows]
    widths = [max(map(cell_len, [head, *cells])) + 2 for head, cells in columns.items() if head != "overrides"]
    room = console.width - sum(widths) - 1
    short = short_names({word.partition("=")[0] for words in overrides for word in words})
    for words in overrides:
        # A word that is too long for its column gets its short name; if it still is, it is broken behind that: no
        # number lies on two lines.
        for place, word in enumerate(words):
            if cell_len(word) > room:
                name, sign, rest = word.partition("=")
                shorter = f"{short[name]}{sign}{rest}"
                words[place] = shorter if cell_len(shorter) <= room else shorter.replace("=", "=\n", 1)
        columns["overrides"].append(" ".join(words))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in columns:
        is_text = head in ("overrides", "status")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != "overrides", overflow="fold")
    for row_cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row_cells))
    console.print(table)
    errors = [f"job {row.job} {row.status}: {row.error}" for row in rows if row.error]
    for line in [*errors, _agreement(rows)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _agreement(rows: Sequence[Row]) -> str:
    groups = equal_weights(rows)
    if not groups:
        return "weights: no job has any"
    if len(groups) == 1:
        [(sha256, equal)] = groups.items()
        if len(equal) == 1:
            return f"weights: sha256 {sha256}" + (", of the only job with a result" if len(rows) > 1 else "")
        return f"weights: {len(equal)} of {len(rows)} jobs have the same sha256 {sha256}"
    parts = [f"{sha256[:SHORT_HASH]} x {len(equal)}" for sha256, equal in groups.items()]
    rest = [f"{len(parts) - MAX_GROUPS} more"] if len(parts) > MAX_GROUPS else []
    return f"weights: {len(groups)} different sha256 in {len(rows)} jobs: {', '.join([*parts[:MAX_GROUPS], *rest])}"
