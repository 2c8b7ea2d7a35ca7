"""The table of jobs in a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.report.groups import equal_weights
from zerotrain.report.rows import Report, Row

SHORT_HASH = 12
MAX_GROUPS = 4
OF_RANKS = "launch.nproc_per_node="


def print_table(report: Report, console: Console) -> None:
    """Print a row for each job, the errors of those that failed, and whether the weights agree."""
    rows = report.rows
    shared = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    ranks_differ = len({row["ranks"] for row in rows} - {None}) > 1
    for name in ("job", "overrides", *["ranks"] * ranks_differ, "status", "val loss", "tokens/s", "ms/step", "weights"):
        is_text = name in ("overrides", "status")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "overrides", overflow="fold")
    for row in rows:
        differing = [each for each in row.overrides if each not in shared]
        if ranks_differ:
            differing = [override for override in differing if not override.startswith(OF_RANKS)]
        table.add_row(
            Text(row.job),
            Text(" ".join(differing)),
            *[_number(row["ranks"], ".0f")] * ranks_differ,
            row.status,
            _number(row["final_val_loss"], ".4f"),
            _number(row["tokens_per_s"], ",.0f"),
            _number(row["step_ms_median"], ".1f"),
            Text((row.weights_sha256 or "-")[:SHORT_HASH]),
        )
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
        return f"weights: {len(equal)} of {len(rows)} jobs have the same sha256 {sha256}"
    each = [f"{sha256[:SHORT_HASH]} x {len(equal)}" for sha256, equal in groups.items()]
    more = [f"{len(each) - MAX_GROUPS} more"] if len(each) > MAX_GROUPS else []
    return f"weights: {len(groups)} different sha256 in {len(rows)} jobs: {', '.join([*each[:MAX_GROUPS], *more])}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
