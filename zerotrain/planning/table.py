"""A plan, printed."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from zerotrain.config.schema import Config
from zerotrain.planning.plan import RunPlan
from zerotrain.planning.rehearsal import StagePlan
from zerotrain.training.report import UNITS, in_unit

COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "scratch", "activations", "peak", "sent")
HEADS = {"parameters": "para-\nmeters", "gathered": "gath-\nered", "gradients": "gra-\ndients"}
HEADS |= {"optimizer": "opti-\nmizer", "activations": "activ-\nations", "sent": "sent/\nstep"}

PARTS, MARKS = ("parameters", "gradients", "optimizer", "all else at the peak"), ("█▓▒░", "#=-.")
BAR_WIDTH = 60
"""Characters of the longest bar."""


def print_plan(console: Console, plan: RunPlan, config: Config) -> None:
    """Print a row for each stage, readable at 80 columns, and the answer in a line.

    Args:
        config: that the plan is of.
    """
    most = max(max(getattr(each, name) or 0 for name in COLUMNS) for each in plan.stages.values())
    unit, unit_nbytes = next((unit for unit in UNITS if most >= unit[1]), UNITS[-1])
    ranks = f"{plan.num_ranks} rank{'s' * (plan.num_ranks > 1)}"
    table = Table(title=f"{unit} of a rank, {ranks}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right")
    for name in COLUMNS:
        table.add_column(HEADS.get(name, name), justify="right")
    table.add_column("fits", justify="right")
    for stage, each in sorted(plan.stages.items()):
        numbers = [getattr(each, name) for name in COLUMNS]
        cells = ["?" if nbytes is None else f"{nbytes / unit_nbytes:.4g}" for nbytes in numbers]
        table.add_row(str(stage), *cells, "yes" if plan.memory.fits(each) else "no")
    console.print(table)
    bars = _bars(plan, MARKS[-1 if console.options.ascii_only else 0])
    for line in (*bars, *_lines(plan, config)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _bars(plan: RunPlan, marks: str) -> Iterator[str]:
    """A bar for each stage: the state, and all that comes and goes, at the peak, without the process itself. A `|` is
    the end of the memory that is left for them."""
    process = plan.memory.beside
    room, longest = plan.memory.device - process, max(map(plan.memory.taken, plan.stages.values())) - process
    for stage, each in sorted(plan.stages.items()):
        state = (each.parameters, each.gradients, each.optimizer)
        bar, held = "", 0
        for mark, nbytes in zip(marks, (*state, plan.memory.taken(each) - process - sum(state)), strict=True):
            held += nbytes
            bar += mark * (round(BAR_WIDTH * held / longest) - len(bar))
        limit = max(0, round(BAR_WIDTH * room / longest))
        if limit < BAR_WIDTH:
            bar = f"{bar.ljust(limit)[:limit]}|{bar[limit:]}"
        yield f"stage {stage}  {bar}"
    yield "  ".join(f"{mark} {name}" for mark, name in zip(marks, PARTS, strict=True)) + "\n"


def _lines(plan: RunPlan, config: Config) -> Iterator[str]:
    each, memory = plan.stages[plan.stage], plan.memory
    if each.host or each.disk:
        tiers = [
            f"{in_unit(nbytes)} in {where}"
            for where, nbytes in (("host memory", each.host), ("files", each.disk))
            if nbytes
        ]
        yield (
            f"offloaded of a rank: {', '.join(tiers)}; a step fetches {in_unit(each.fetched)} and stores "
            f"{in_unit(each.stored)}"
        )
    if each.sums:
        yield f"scratch holds {in_unit(each.sums)} of sums of micro-batches and virtual ranks"
    yield f"largest unit: {in_unit(each.largest_unit)}"
    if each.unknown_because is not None:
        yield f"warning: activations are unknown: {each.unknown_because} cannot be followed without values"
    if config.model_switches["compile"]:
        yield "model.compile=true: planned uncompiled, and compiled units save the same or less"
    owner = "of the process itself" if memory.on_host else "of cuBLAS"
    beside = memory.beside
    process = f" with {in_unit(beside)} {owner}" if beside else ""
    where = "" if each.peak_phase is None else f" in its {each.peak_phase}"
    least = "at least " if each.peak is None else ""
    yield (
        f"stage {plan.stage} {'fits' if plan.fits else 'does not fit'}: a rank holds {least}"
        f"{in_unit(memory.taken(each))}{where}{process}, of {in_unit(memory.device)}"
    )
    fitting = [stage for stage, other in sorted(plan.stages.items()) if memory.fits(other)]
    if not plan.fits:
        yield (
            f"next: {f'zero.stage={fitting[0]} fits' if fitting else 'no stage fits'}; less memory take: a smaller "
            f"{', '.join(('train.micro_batch_size', *_savings(each, config, on_host=memory.on_host)))}"
        )


def _savings(plan: StagePlan, config: Config, *, on_host: bool) -> Iterator[str]:
    """Settings that take less memory than those that a plan has."""
    if not plan.recomputes:
        yield "model.activation_checkpointing=true"
    if config.precision.name == "fp32":
        yield "precision=bf16"
    if not on_host and config.offload.optimizer == "device":
        yield "offload.optimizer=cpu"
