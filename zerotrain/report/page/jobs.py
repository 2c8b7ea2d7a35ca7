"""The table of the jobs, in which one row is 1.00."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerotrain.report.groups import equal_weights, is_number
from zerotrain.report.page.markup import Markup, hash_of, hidden, letter_of, mark_of, tag
from zerotrain.report.rows import KINDS, Report, Row, short_names, value_text
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
    shown: Callable[[float], str]
    better: int = 0
    """-1: the least is the best; 1: the most is; 0: none is."""


def held(row: Row) -> float | None:
    """Bytes that rank 0 holds at rest."""
    known = [nbytes for kind in KINDS if (nbytes := row[f"{kind}_nbytes"]) is not None]
    return sum(known) if known else None


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS = {
    "final_val_loss": JobColumn("val loss", lambda row: row["final_val_loss"], _loss, -1),
    "final_train_loss": JobColumn("train loss", lambda row: row["final_train_loss"], _loss),
    "tokens_per_s": JobColumn("tokens/s", lambda row: row["tokens_per_s"], _count, 1),
    "samples_per_s": JobColumn("samples/s", lambda row: row["samples_per_s"], _count, 1),
    "step_ms_median": JobColumn("ms/step", lambda row: row["step_ms_median"], lambda value: f"{value:,.1f}", -1),
    "held": JobColumn("memory", held, in_bytes, -1),
    "peak_nbytes": JobColumn("peak", lambda row: row["peak_nbytes"], in_bytes),
    "sent_nbytes": JobColumn("sent/step", lambda row: row["sent_nbytes"], in_bytes, -1),
}


def jobs_section(report: Report) -> Markup:
    """The table of all jobs: in their order, or of many the best first."""
    by_loss = len(report.rows) > NUM_IN_ORDER and len(report.ranked) > 1
    others = [row for row in report.rows if row not in report.ranked]
    table = _Table(report=report, rows=[*report.ranked, *others] if by_loss else report.rows)
    sorted_by = COLUMNS.get(report.loss) if by_loss else None
    notes = ["\N{BLACK STAR} is the best job; the best number of a column has the colour."] if table.compares else []
    notes += ["Small numbers are ratios to the row that is 1.00."] if table.compares else []
    more = len(report.settings) - MAX_SETTINGS
    notes += [f"{more} more settings that differ are in sweep.csv."] if more > 0 else []
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
        known = [name for name, column in COLUMNS.items() if any(column.value(row) is not None for row in rows)]
        return [COLUMNS[name] for name in known if name != "samples_per_s" or "tokens_per_s" not in known]

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
        of_settings = [_head(short[name], of=name) for name in self.settings]
        numbers = [_head(each.head, is_number=True, is_sorted=each is sorted_by) for each in self.columns]
        weights = [_head("weights")] if self.has_weights else []
        return tag("tr", pick, _head("job"), *of_settings, _head("status"), *numbers, *weights)

    def line(self, row: Row) -> Markup:
        """The cells of a job."""
        is_best = self.compares and row is self.report.ranked[0]
        name = tag(
            "th", row.job, tag("b", " \N{BLACK STAR}", hidden("best")) if is_best else "", scope="row", title=row.job
        )
        settings = [_setting(each, row.settings) for each in self.settings]
        numbers = [_number(column, row, self.reference, self.best[column.head]) for column in self.columns]
        weights = _weights(row, self.shared) if self.has_weights else ""
        style = "best" if is_best else None if row.status == "completed" else "off"
        cells = [self._pick(row), name, *settings, _status(row), *numbers, weights]
        return tag("tr", *cells, data_j=self.places[id(row)], class_=style)

    def _pick(self, row: Row) -> Markup:
        if not self.compares:
            return Markup()
        words, place = f"job {row.job} is 1.00", str(self.places[id(row)])
        is_it = row is self.reference
        button = tag("input", type="radio", name="reference", value=place, checked=is_it, aria_label=words)
        return tag("td", button, class_="pick")


def _head(words: str, *, of: str = "", is_number: bool = False, is_sorted: bool = False) -> Markup:
    group = of.removesuffix(words) if of.endswith(words) else ""
    inner = [tag("small", group)] if group else []
    button = tag("button", *inner, words, type="button", title=of or None)
    order = "ascending" if is_sorted else None
    return tag("th", button, scope="col", class_="n" if is_number else None, aria_sort=order)


def _setting(name: str, settings: Mapping[str, Any]) -> Markup:
    if name not in settings:
        return tag("td", DASH)
    value = settings[name]
    known = float(value) if is_number(value) else None
    return tag("td", value_text(name, value), class_="n" if known is not None else None, data_v=known)


def _number(column: JobColumn, row: Row, reference: Row | None, best: float | None) -> Markup:
    value = column.value(row)
    if value is None:
        return tag("td", DASH, class_="n")
    base = None if reference is None or not column.better else column.value(reference)
    ratio = "" if base is None else tag("i", f"{value / base:.2f}" if base else "")
    style = "n top" if best is not None and value == best and row.status == "completed" else "n"
    return tag("td", column.shown(value), ratio, class_=style, data_v=value)


def _best(column: JobColumn, report: Report) -> float | None:
    """The best value of a column; None where half of the jobs have it."""
    values = [value for row in report.ranked if (value := column.value(row)) is not None]
    if not column.better or not values:
        return None
    best = max(values) if column.better > 0 else min(values)
    return best if 2 * values.count(best) < len(values) else None


def _status(row: Row) -> Markup:
    return tag("td", mark_of(row.status), row.status, class_=f"status {row.status}")


def _weights(row: Row, shared: Sequence[str]) -> Markup:
    if row.weights_sha256 is None:
        return tag("td", DASH)
    letter = tag("b", letter_of(shared.index(row.weights_sha256))) if row.weights_sha256 in shared else ""
    return tag("td", hash_of(row.weights_sha256), letter, class_="weights")
