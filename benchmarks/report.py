"""The table of one comparison, in Markdown."""

import math
import statistics
from collections.abc import Callable

from benchmarks.engines import ENGINES
from benchmarks.results import Comparison, Measurement
from benchmarks.standing import LOSS_TOLERANCE, Standing

COLUMNS: dict[str, Callable[[Standing, Measurement], str]] = {
    "engine": lambda _, median: ENGINES[median.engine].label,
    "ms/step": lambda _, median: f"{median.step_ms:.1f}",
    "rounds": lambda standing, median: _spread(standing.comparison.rounds_of(median.engine)),
    "x floor": lambda standing, median: _ratio(median.step_ms, standing.floor_ms),
    "x DDP": lambda standing, median: _ratio(median.step_ms, standing.ddp_ms),
    "x best peer of the stage": lambda standing, median: (
        _ratio(median.step_ms, standing.best_peer_ms(median.engine)) if ENGINES[median.engine].is_ours else ""
    ),
    "tokens/s": lambda standing, median: f"{1e3 * standing.comparison.workload.num_tokens / median.step_ms:,.0f}",
    "MFU": lambda _, median: "" if median.mfu is None else f"{median.mfu:.1%}",
    "host ms": lambda _, median: "" if median.host_ms is None else f"{median.host_ms:.1f}",
    "MB sent": lambda _, median: megabytes(median.sent_nbytes, 1),
    "MB by theory": lambda _, median: megabytes(median.theory_nbytes, 1),
    "device peak MB": lambda _, median: megabytes(median.device_peak_nbytes),
    "peak MB": lambda _, median: megabytes(median.peak_nbytes),
    "above the interpreter": lambda _, median: megabytes(median.own_peak_nbytes),
    "loss": lambda _, median: f"{median.loss:.5f}",
}
"""Title and cell. A column that is empty for every engine is left out."""
SPLIT_COLUMNS: dict[str, Callable[[Measurement], str]] = {
    "engine": lambda median: ENGINES[median.engine].label,
    "compute": lambda median: _number(median.compute_ms, 1),
    "exposed communication": lambda median: _number(median.exposed_ms, 1),
    "update": lambda median: _number(median.update_ms, 1),
    "other": lambda median: _number(median.other_ms, 1),
    "CPU time of other threads": lambda median: _number(median.threads_ms, 1),
    "operations": lambda median: _number(median.num_ops),
    "calls of Python": lambda median: _number(median.num_calls),
}


def report(comparison: Comparison) -> str:
    """What was run and on what, the table, and whether the losses agree."""
    standing = Standing(comparison)
    rows = [
        [cell(standing, standing.medians[name]) for cell in COLUMNS.values()]
        for name in ENGINES
        if name in standing.medians
    ]
    table = _filled([list(COLUMNS), *rows])
    failures = [f"**{name} failed**: {reason.splitlines()[0]}" for name, reason in comparison.failures.items()]
    left_out = [f"{name} left out: {reason}." for name, reason in comparison.left_out.items()]
    parts = (_heading(comparison), table, _split(standing), _loss_line(standing), *failures, *left_out)
    return "\n\n".join(part for part in parts if part) + "\n"


def _split(standing: Standing) -> str:
    """Where the steps go; nothing if that was not measured."""
    medians = [standing.medians[name] for name in ENGINES if name in standing.medians]
    rows = [[cell(each) for cell in SPLIT_COLUMNS.values()] for each in medians if each.num_calls is not None]
    if not rows:
        return ""
    return (
        "Where a step goes, of a rank, in ms, in steps of their own: compute is forward and backward with the engine's "
        "hooks; operations and calls are the main thread's.\n\n" + _filled([list(SPLIT_COLUMNS), *rows])
    )


def _filled(rows: list[list[str]]) -> str:
    """A table without its empty columns. The first row is the head."""
    filled = [index for index, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    return markdown([[row[index] for index in filled] for row in rows])


def markdown(rows: list[list[str]]) -> str:
    """A table of Markdown; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def megabytes(nbytes: float | None, digits: int = 0) -> str:
    """In units of 10^6 bytes; empty for None."""
    return "" if nbytes is None else f"{nbytes / 1e6:.{digits}f}"


def _heading(comparison: Comparison) -> str:
    workload = comparison.workload
    shape = workload.shape
    rate = comparison.link_bit_per_s
    place = "one host" if rate is None else f"two hosts joined by a link of {rate / 1e9:g} Gbit/s"
    clipped = "" if workload.max_grad_norm is None else f", gradients clipped to a norm of {workload.max_grad_norm:g}"
    num_rounds = max(len(comparison.rounds_of(engine)) for engine in comparison.engines)
    load = statistics.median(each.other_load for each in comparison.measurements)
    return (
        f"`{comparison.command}`, {comparison.date}, {comparison.machine}.\n\n"
        f"GPT {workload.size}, {workload.precision}{', compiled' if workload.compiled else ''}, "
        f"{workload.num_ranks} ranks on {place}, {workload.num_micro_batches} x {shape.micro_batch_size} sequences of "
        f"{shape.seq_len} tokens per rank and step{clipped}; medians of {num_rounds} "
        f"interleaved rounds of {workload.num_steps} steps after {workload.num_warmup_steps} to warm up. "
        f"Other work took {load:.0%} of the machine (median). "
        "MB are 10^6 bytes, of one rank."
    )


def _spread(rounds: list[Measurement]) -> str:
    times_ms = [each.step_ms for each in rounds]
    return f"{min(times_ms):.0f} - {max(times_ms):.0f}" if len(rounds) > 1 else ""


def _ratio(value: float, of: float) -> str:
    return "" if math.isnan(of) else f"{value / of:.2f}"


def _loss_line(standing: Standing) -> str:
    tolerance = LOSS_TOLERANCE[standing.comparison.workload.precision]
    different = standing.different_losses()
    if not different:
        return f"Losses of the last step agree within {tolerance:g} of their median: the engines did the same work."
    names = ", ".join(f"{name} ({distance:.1e})" for name, distance in different.items())
    return f"**Losses differ** by more than {tolerance:g} of their median: {names}."
