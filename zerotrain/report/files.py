"""sweep.csv, sweep.json and report.html, each written whole or not at all. They replace no file of somebody else's."""

import csv
import io
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from zerotrain.errors import ConfigError
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import only_regular, printable
from zerotrain.report.groups import equal_weights, spreads
from zerotrain.report.page.page import HEAD, page_of
from zerotrain.report.rows import Report, Row, read_report

CSV_NAME, JSON_NAME, PAGE_NAME = "sweep.csv", "sweep.json", "report.html"
HEADS = {CSV_NAME: b"job,folder,status,", JSON_NAME: b'{"report": "zerotrain"', PAGE_NAME: HEAD}
"""How each of our files begins."""
_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t")


def write_reports(folder: Path) -> Report:
    """Read the jobs in a sweep's folder, or the run that a folder is, and write into it what is told of them.

    Raises:
        ConfigError: a file that is none of ours has the name of one.
        OSError: a file cannot be written.
    """
    report = read_report(folder)
    write_files(report, folder)
    return report


def write_files(report: Report, out: Path, names: Collection[str] = tuple(HEADS)) -> None:
    """Write the files of a report, or those of some names.

    Raises:
        ConfigError, OSError: as of `write_reports`.
    """
    for name in names:
        _require_ours(out / name, HEADS[name])
    for name in names:
        content = _CONTENTS[name](report)
        with whole(out / name) as file:
            file.write(content)


def csv_of(report: Report) -> bytes:
    """A line for each job. An apostrophe precedes text that a program of tables would take for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = ["job", "folder", "status"]
    others = [*(report.rows[0].figures if report.rows else ()), "weights_sha256", "config_hash", "error", "command"]
    # A setting of an edited config may have the name of another column, and readers would take it for that.
    settings = [f"config.{name}" if name in (*first, *others) else name for name in report.settings]
    writer.writerow(map(_cell, [*first, *settings, *others]))
    for body in (row_body(row, report) for row in report.rows):
        values = [*map(body.get, first), *body["settings"].values(), *map(body.get, others)]
        writer.writerow(map(_cell, values))
    return text.getvalue().encode(errors="backslashreplace")


def json_of(report: Report) -> bytes:
    """The same rows as objects, the groups of equal weights, and the spread over seeds."""
    best = report.ranked[0].job if report.ranked else None
    content = {
        "report": "zerotrain",
        "title": report.title,
        "loss": report.loss,
        "best": best,
        "settings": report.settings,
        "counts": report.counts,
        "weights": {sha256: [row.job for row in rows] for sha256, rows in equal_weights(report.rows).items()},
        "seeds": [
            {
                "jobs": [row.job for row in each.rows],
                "mean": each.mean,
                "deviation": each.deviation,
                "least": each.least,
                "most": each.most,
            }
            for each in spreads(report)
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
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_STARTS_A_FORMULA) else value
    return repr(value)


def _require_ours(path: Path, head: bytes) -> None:
    """A ConfigError where the name of a file of ours belongs to something else; nothing of a user's is erased."""
    try:
        with open(path, "rb", opener=only_regular) as file:
            is_ours = file.read(len(head)) == head
    except FileNotFoundError:
        return
    except OSError:  # a folder, a FIFO, or a file that nobody may read
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"{path} is no report of zerotrain, and stays as it is; rename it, or give --out another folder"
        )


_CONTENTS: dict[str, Callable[[Report], bytes]] = {CSV_NAME: csv_of, JSON_NAME: json_of, PAGE_NAME: page_of}
