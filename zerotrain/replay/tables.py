"""Shows as tables and lines what a replay has found."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.files.untrusted import printable
from zerotrain.replay.record import Record
from zerotrain.replay.report import Part, StepReport

BAR = 12
"""Characters of the largest gradient."""

NOTHING_RECORDED = (
    "nothing that is recorded is different here: its rows, or the code of the model or the data, are not as they were"
)
"""The cause that is left, since the steps before it were those of the run."""


def print_report(
    console: Console, report: StepReport, began_at: int, record: Record, differs: str | None, causes: Sequence[str]
) -> None:
    """Print what the step was made of, and whether it is that of the run."""
    worst = report.worst
    table = Table(
        "virtual rank",
        "micro-batch",
        "loss",
        "gradient",
        "largest in",
        "",
        title=f"step {report.step}",
        box=box.SIMPLE_HEAD,
    )
    for each in report.parts:
        mark = "bold" if each is worst else ""
        table.add_row(
            str(each.virtual_rank),
            str(each.micro_batch),
            *_numbers(each),
            Text(each.largest),
            _bar(each, worst),
            style=mark,
        )
    console.print(table)
    rows = Table(title="rows of the micro-batch that stands out", box=box.SIMPLE_HEAD)
    alone = ("loss", "gradient") if report.rows[0].alone else ()
    for name in ("row", "where", *alone, "text"):
        rows.add_column(name, overflow="fold")  # a path has no spaces to break it at
    for row in report.rows:
        numbers = _numbers(row.alone) if row.alone else []
        rows.add_row(str(row.row), Text(printable(row.source, keep="")), *numbers, Text(row.text))
    console.print(rows)
    lines = [] if report.nonfinite is None else [f"first not finite: {report.nonfinite}"]
    compared = [step for step in record.steps if began_at < step <= report.step]
    if differs is not None:
        lines += [differs, *(f"  {each}" for each in causes or [NOTHING_RECORDED])]
    elif compared:
        steps = f"{len(compared)} step{'s' * (len(compared) > 1)}"
        lines.append(f"{steps} from step {began_at + 1} on: as the run recorded, to the bit")
    if report.step not in record.steps:
        lines.append(f"step {report.step} is not recorded: nothing to compare it with")
    for line in lines:
        console.print(Text(printable(line, keep="")), soft_wrap=True)
    sys.stdout.flush()


def print_around(console: Console, steps: Sequence[Mapping[str, Any]], asked: int) -> None:
    """Print a row for each step, the one asked for in bold."""
    table = Table(
        "step",
        "loss",
        "gradient",
        "clipped to",
        "learning rate",
        "the run",
        title="steps around it",
        box=box.SIMPLE_HEAD,
    )
    for each in steps:
        clipped = "skipped" if each["skipped"] else _number(each["grad_norm"] * each["clip_coefficient"])
        same = {None: "not recorded", True: "the same", False: "differs"}[each["as_recorded"]]
        numbers = map(_number, (each["loss"], each["grad_norm"]))
        style = "bold" if each["step"] == asked else ""
        table.add_row(str(each["step"]), *numbers, clipped, _number(each["lr"]), same, style=style)
    console.print(table)


def _bar(part: Part, longest: Part) -> str:
    """As long as the gradient is large."""
    if not (math.isfinite(part.grad_norm) and math.isfinite(longest.grad_norm)):
        return "" if math.isfinite(part.grad_norm) else "!" * BAR
    return "█" * round(BAR * part.grad_norm / (longest.grad_norm or 1.0))


def _numbers(part: Part) -> list[str]:
    return [_number(part.loss), _number(part.grad_norm)]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
