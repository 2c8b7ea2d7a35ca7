"""A run's output: lines, and at its end the table of bytes that each rank holds and sends, beside the theory."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.files.untrusted import printable
from zerotrain.training.result import RunResult

MAX_LINE = 100_000
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def in_unit(nbytes: float) -> str:
    """Such as 10.2 MB."""
    unit, unit_nbytes = next((unit for unit in UNITS if nbytes >= unit[1]), UNITS[-1])
    return f"{nbytes / unit_nbytes:.4g} {unit}"


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


@dataclass(frozen=True)
class RankUsage:
    """Bytes of one rank: held at rest on the device, at most held at once, sent in one optimizer step, and
    held at rest elsewhere."""

    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    sent_nbytes: int
    theory_parameters_nbytes: int
    theory_gradients_nbytes: int
    theory_optimizer_nbytes: int
    theory_sent_nbytes: int
    peak_nbytes: int
    offloaded_nbytes: int = 0
    theory_offloaded_nbytes: int = 0
    reserved_nbytes: int = 0
    """See `Device.reserved_nbytes`."""


@dataclass(frozen=True, kw_only=True)
class PlannedUsage:
    """The bytes of the rank that holds most, as they were planned before the run; None: not known."""

    stage: int
    """The stage that they are of."""
    parameters: int
    gradients: int
    optimizer: int
    offloaded: int
    scratch: int
    sent: int | None
    """To other ranks, in a step."""
    peak: int | None
    """With the process itself, where the measured one has it too."""
    memory: int | None = None
    """That a rank may hold, where the stage was chosen by it."""
    alternatives: dict[str, int] = field(default_factory=dict)
    """The peak that was planned for each other stage, the best first; none unless the stage was chosen."""

    def by_column(self) -> dict[str, int | None]:
        """The bytes by column of the table."""
        nbytes = asdict(self)
        kinds = ("parameters", "gradients", "optimizer", "offloaded", "peak")
        return {kind: nbytes[kind] for kind in kinds} | {"sent/step": self.sent}


def measure_usage(*, engine: ZeroEngine, device: torch.device, num_micro_batches: int) -> RankUsage:
    """The bytes that this rank holds now, between steps, and sent in the last step."""
    memory = engine.memory_bytes()
    held = {f"{kind}_nbytes": memory[kind] for kind in memory["theory"]}
    return RankUsage(
        **held,
        **{f"theory_{kind}_nbytes": nbytes for kind, nbytes in memory["theory"].items()},
        sent_nbytes=engine.ledger.last_step.sent_nbytes,
        theory_sent_nbytes=engine.theoretical_sent_nbytes(num_micro_batches),
        peak_nbytes=device_of(device).peak_nbytes(),
        reserved_nbytes=device_of(device).reserved_nbytes(),
    )


def gather_usages(usage: RankUsage, world: World) -> list[RankUsage]:
    """The usage of every rank, in rank order, on every rank. Collective."""
    table = torch.zeros(world.size, len(fields(RankUsage)), dtype=torch.int64, device=world.device)
    table[world.rank] = torch.tensor(list(asdict(usage).values()), device=world.device)
    return [RankUsage(*row) for row in world.sum(table).tolist()]


def print_report(console: Console, *, result: RunResult, usages: Sequence[RankUsage], device: torch.device) -> None:
    """Print one line of results and one table of bytes, readable at 80 columns; where the stage has changed, with
    rows for each, and a row of what was planned, where the run was. `usages` are those of all ranks at the end, in rank
    order."""
    planned = (result.memory_bytes or {}).get("planned")
    of_plan = None if planned is None else PlannedUsage(**planned)
    caption = f"measured / theory; peak of {device_of(device).peak_of}"
    if reserved := max((usage.reserved_nbytes for usage in usages), default=0):
        caption += f", for which torch reserved {in_unit(reserved)}"
    past_stages = [entry for entry in result.stages[:-1] if entry["ranks"]]
    by_stage = [[RankUsage(**usage) for usage in entry["ranks"]] for entry in past_stages] + [list(usages)]
    if past_stages:
        ranges = [f"{entry['stage']} from step {entry['from_step']}" for entry in [*past_stages, result.stages[-1]]]
        caption = f"stage {', '.join(ranges)}\n{caption}"
    usages = [usage for stage_usages in by_stage for usage in stage_usages]
    table = Table(title=_summary(result), caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    columns: dict[str, list[tuple[int, ...]]] = {
        "parameters": [(usage.parameters_nbytes, usage.theory_parameters_nbytes) for usage in usages],
        "gradients": [(usage.gradients_nbytes, usage.theory_gradients_nbytes) for usage in usages],
        "optimizer": [(usage.optimizer_nbytes, usage.theory_optimizer_nbytes) for usage in usages],
        "offloaded": [(usage.offloaded_nbytes, usage.theory_offloaded_nbytes) for usage in usages],
        "sent/step": [(usage.sent_nbytes, usage.theory_sent_nbytes) for usage in usages],
        "peak": [(usage.peak_nbytes,) for usage in usages],
    }
    if not any(map(any, columns["offloaded"])):
        del columns["offloaded"]
    else:  # most of the others are empty then
        columns = {name: values for name, values in columns.items() if any(map(any, values))}
    table.add_column("stage,\nrank" if past_stages else "rank", justify="right")
    cells, planned_cells = [], list[str]()
    for name, values in columns.items():
        unit, unit_nbytes = next((unit for unit in UNITS if max(map(max, values)) >= unit[1]), UNITS[-1])
        table.add_column(f"{name}\n{unit}", justify="right")
        cells.append([" / ".join(f"{nbytes / unit_nbytes:.4g}" for nbytes in cell) for cell in values])
        nbytes = None if of_plan is None else of_plan.by_column()[name]
        planned_cells.append("?" if nbytes is None else f"{nbytes / unit_nbytes:.4g}")
    rows, plans = zip(*cells, strict=True), {} if of_plan is None else {of_plan.stage: planned_cells}
    for stage_usages, entry in zip(by_stage, [*past_stages, *result.stages[-1:]] or [{}], strict=True):
        for rank in range(len(stage_usages)):
            table.add_row(f"{entry['stage']}, {rank}" if past_stages else str(rank), *next(rows))
        if (stage := entry.get("stage", result.stage)) in plans:
            table.add_row(f"{stage}, plan" if past_stages else "plan", *plans[stage])
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
