"""A run's output: lines, and at its end the table of bytes that each rank holds and sends, beside the theory."""

import textwrap
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.files.untrusted import printable
from zerotrain.training.result import RunResult

MAX_LINE = 100_000
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def unit_of(nbytes: float) -> tuple[str, float]:
    """The unit for a short number of bytes, and its bytes."""
    return next((unit for unit in UNITS if nbytes >= unit[1]), UNITS[-1])


def in_unit(nbytes: float) -> str:
    """Such as 10.2 MB."""
    unit, unit_nbytes = unit_of(nbytes)
    return f"{nbytes / unit_nbytes:.4g} {unit}"


def short(number: float, digits: int = 3) -> str:
    """A number in at most so many digits, such as 950, 0.25, 1.2k or 34M."""
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
    unit, size = next((unit for unit in units if abs(number) >= unit[1]), units[-1])
    return f"{number / size:.{digits}g}{unit}"


def say(console: Console, *lines: str) -> None:
    """Print lines with their [brackets]: in a terminal broken between words, elsewhere whole."""
    for line in lines:
        text = printable(line, MAX_LINE)
        for part in wrap_text(text, console.width) if console.is_terminal else [text]:
            console.print(part, highlight=False, markup=False, soft_wrap=True)


def wrap_text(text: str, width: int) -> list[str]:
    """The lines of a text in a terminal of this width. A word, such as a long path, is never broken."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [part for line in text.split("\n") for part in wrapper.wrap(line) or [""]]


def gather_usages(engine: ZeroEngine, gradient_accumulation_steps: int) -> list[dict[str, int]]:
    """The bytes that each rank holds now, between steps, and sent in the last step: in rank order, on every rank.
    Collective.

    Args:
        gradient_accumulation_steps: micro-batches of a virtual rank.

    Returns:
        By NAME_nbytes, and theory_NAME_nbytes: parameters, gradients and optimizer (held at rest on the device),
        offloaded (held at rest elsewhere), sent (in one optimizer step) and across (the part of it from one replica of
        sharded parameters to another); peak_nbytes (at most held at once) and reserved_nbytes (see
        `Device.reserved_nbytes`).
    """
    num_micro_batches = gradient_accumulation_steps * len(engine.virtual_ranks)
    memory, device = engine.memory_bytes(), device_of(engine.world.device)
    usage = {f"{kind}_nbytes": memory[kind] for kind in memory["theory"]}
    usage |= {f"theory_{kind}_nbytes": nbytes for kind, nbytes in memory["theory"].items()}
    usage |= {
        "sent_nbytes": engine.ledger.last_step.sent_nbytes,
        "theory_sent_nbytes": engine.theoretical_sent_nbytes(num_micro_batches),
        "across_nbytes": engine.ledger.last_step.across_nbytes,
        "theory_across_nbytes": engine.theoretical_across_nbytes(num_micro_batches),
        "peak_nbytes": device.peak_nbytes(),
        "reserved_nbytes": device.reserved_nbytes(),
    }
    return engine.collectives.gather_objects(usage, name="usage")


COLUMNS = {name: name for name in ("parameters", "gradients", "optimizer", "offloaded")}
COLUMNS |= {"sent/step": "sent", "across": "across"}
"""Columns of the table, and how the names of `gather_usages` begin that each has measured and in theory."""
_OFTEN_EMPTY = ("offloaded", "across")


def print_report(console: Console, *, result: RunResult, usages: list[dict[str, int]], device: torch.device) -> None:
    """Print one line of results and one table of bytes, readable at 80 columns; where the stage has changed, with
    rows for each, and a row of what was planned, where the run was. `usages` are those of all ranks at the end, in rank
    order."""
    planned = (result.memory_bytes or {}).get("planned")
    caption = f"measured / theory; peak of {device_of(device).peak_of}"
    if reserved := max((usage["reserved_nbytes"] for usage in usages), default=0):
        caption += f", for which torch reserved {in_unit(reserved)}"
    last: dict[str, Any] = result.stages[-1] if result.stages else {"stage": result.stage}
    stages = [entry for entry in result.stages[:-1] if entry["ranks"]]
    stages.append(last | {"ranks": usages})
    has_changed = len(stages) > 1
    if has_changed:
        ranges = ", ".join(f"{entry['stage']} from step {entry['from_step']}" for entry in stages)
        caption = f"stage {ranges}\n{caption}"
    rows: list[tuple[str, dict[str, tuple[int | None, ...]]]] = []
    for entry in stages:
        of_stage = f"{entry['stage']}, " if has_changed else ""
        for rank, usage in enumerate(entry["ranks"]):
            names = {name: (f"{kind}_nbytes", f"theory_{kind}_nbytes") for name, kind in COLUMNS.items()}
            # A run that goes on may have a stage from before there was a mesh.
            pairs = {name: (usage.get(measured, 0), usage.get(theory, 0)) for name, (measured, theory) in names.items()}
            rows.append((f"{of_stage}{rank}", {**pairs, "peak": (usage["peak_nbytes"],)}))
        if planned is not None and planned["stage"] == entry["stage"]:
            nbytes = {name: planned.get(kind, 0) for name, kind in COLUMNS.items()} | {"peak": planned["peak"]}
            rows.append((f"{of_stage}plan", {name: (number,) for name, number in nbytes.items()}))
    table = Table(title=_summary(result), caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage,\nrank" if has_changed else "rank", justify="right")
    measured = [cells for label, cells in rows if not label.endswith("plan")]
    most = {name: max(number or 0 for cells in measured for number in cells[name]) for name in (*COLUMNS, "peak")}
    # Most of the other columns are empty if something is offloaded.
    columns = [name for name, number in most.items() if number or not (most["offloaded"] or name in _OFTEN_EMPTY)]
    digits, table.collapse_padding = (3, True) if "across" in columns else (4, False)
    for name in columns:
        table.add_column(f"{name}\n{unit_of(most[name])[0]}", justify="right")
    for label, cells in rows:
        texts = []
        for name in columns:
            _, unit_nbytes = unit_of(most[name])
            numbers = ["?" if number is None else f"{number / unit_nbytes:.{digits}g}" for number in cells[name]]
            texts.append(" / ".join(numbers))
        table.add_row(label, *texts)
    console.print(table)


def _summary(result: RunResult) -> str:
    parts = [f"{result.steps} steps"]
    if result.skipped_steps:
        parts.append(f"{result.skipped_steps} skipped")
    if result.final_train_loss is not None:
        parts.append(f"train loss {result.final_train_loss:.4f}")
    if result.final_val_loss is not None:
        parts.append(f"validation loss {result.final_val_loss:.4f}")
    parts += [f"{name} {loss:.4f}" for name, loss in (result.val_loss_by_source or {}).items()]
    of_all = {name: value for name, value in (result.val_metrics or {}).items() if "/" not in name}
    parts += [f"{name.removeprefix('val_')} {value:.4g}" for name, value in of_all.items()]
    if result.tokens_per_s is not None:
        parts.append(f"{result.tokens_per_s:,.0f} tokens/s")
        if result.labels_per_s is not None and round(result.labels_per_s) != round(result.tokens_per_s):
            parts.append(f"{result.labels_per_s:,.0f} labels/s")
    elif result.samples_per_s is not None:
        parts.append(f"{result.samples_per_s:,.0f} samples/s")
    if result.mfu is not None:
        parts.append(f"{result.mfu:.0%} MFU")
    return ", ".join(parts)
