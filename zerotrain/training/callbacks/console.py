"""The lines of a run in a terminal: its description before the first step, and its progress."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.fetch import tokens_known
from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.files.untrusted import duration, printable
from zerotrain.training.callback import Callback, Closing, Run
from zerotrain.training.callbacks.evaluation import rows_of_set
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.report import in_unit, short, unit_of, wrap_text

# Progress for the user: one changing line in a terminal, a few plain lines anywhere else.


MAX_PLAIN_LINES = 10
BAR_WIDTH = 8
SPEED_ESTIMATED_OVER_S = 3600.0
"""The speed is that of the steps in this time, of the last thousand at most. It is long, as two steps must lie in it
for the time left to be told."""
MIN_WIDTH_OF_BAR = 100
"""Columns of a terminal with room for a bar beside the numbers."""


class Measurements:
    """The last measurements of training and of the validation loss, each with its step."""

    def __init__(self) -> None:
        self.training: dict[str, Any] = {}
        self.trained_at = 0
        self.val_losses: dict[str, float] = {}
        """By the names in a line."""
        self.evaluated_at = 0

    def note(self, metrics: dict[str, Any], step: int) -> None:
        """Take what was measured after a step."""
        if "train_loss" in metrics:
            self.training, self.trained_at = metrics, step
        if losses := {name: loss for name, loss in metrics.items() if name.partition("/")[0] == "val_loss"}:
            self.val_losses = {name.replace("val_loss", "val", 1): loss for name, loss in losses.items()}
            self.evaluated_at = step

    def parts(self, step: int) -> list[str]:
        """The numbers, most important first. One that was not measured after `step` says its step, as in
        `val 2.456@100`."""
        parts = []
        if self.training:
            parts.append(f"loss {self.training['train_loss']:.3f}{_at(self.trained_at, step)}")
        at = _at(self.evaluated_at, step)
        val = {name: f"{name} {loss:.3f}{at}" for name, loss in self.val_losses.items()}
        parts += [text for name, text in val.items() if "/" not in name]
        if self.training:
            parts += self._training_parts()
        return parts + [text for name, text in val.items() if "/" in name]

    def _training_parts(self) -> list[str]:
        """The data read so far, the speed and the gradient."""
        metrics, parts = self.training, []
        if (epoch := metrics.get("epoch")) is not None:
            parts.append(f"epoch {epoch:.2f}")
        if (tokens := metrics.get("tokens")) is not None:
            parts.append(f"{short(tokens)} tokens")
        if metrics["skipped_steps"]:
            parts.append(f"{metrics['skipped_steps']} skipped")
        is_of_tokens = metrics["tokens_per_s"] is not None
        speed, unit = ("tokens_per_s", "tok/s") if is_of_tokens else ("samples_per_s", "samples/s")
        parts.append(f"{metrics[speed]:.0f} {unit}")
        if metrics["mfu"] is not None:
            parts.append(f"mfu {metrics['mfu']:.0%}")
        return [*parts, f"grad {metrics['grad_norm']:.2f}>{metrics['grad_norm_clipped']:.2f}"]


def _at(measured_at: int, step: int) -> str:
    return "" if measured_at == step else f"@{measured_at}"


def _time_left(task: Task) -> list[str]:
    """The time left, if there is any and it can be estimated."""
    is_done = task.total is None or task.completed >= task.total
    return [] if is_done or task.time_remaining is None else [f"{duration(task.time_remaining)} left"]


class ShowProgress(Closing):
    """Shows on a console how far training is, and what was measured; a quiet one shows nothing."""

    ranks = "first"

    def __init__(self) -> None:
        self._num_due_lines = -1
        """Plain lines due up to the last one shown; the first step that is logged is always shown."""
        self._measured = Measurements()
        self._shown_evaluation = 0
        """Step of the evaluation in the last plain line."""
        self._line: Progress | None = None
        """The line of a terminal. It measures the time left elsewhere too."""

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        console = run.console
        has_bar = console.width >= MIN_WIDTH_OF_BAR
        columns: list[ProgressColumn] = [_Line(console, self._measured, reserved=BAR_WIDTH + 1 if has_bar else 0)]
        if has_bar:
            columns.append(BarColumn(bar_width=BAR_WIDTH))
        is_plain = not console.is_terminal or console.is_dumb_terminal  # no line can be rewritten
        self._line = Progress(*columns, console=console, disable=is_plain, speed_estimate_period=SPEED_ESTIMATED_OVER_S)
        self._line.add_task("", total=run.max_steps, completed=run.step)
        self._line.start()

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if self._line is not None:
            self._line.advance(self._line.tasks[0].id)

    def log(self, run: Run, metrics: dict[str, Any]) -> None:
        """Show what was measured; outside a terminal at most once in a tenth of the run."""
        self._measured.note(metrics, run.step)
        num_due_lines = run.step * MAX_PLAIN_LINES // run.max_steps
        if "train_loss" in metrics and num_due_lines > self._num_due_lines:
            self._num_due_lines = num_due_lines
            self._print_plain(run)

    def end(self, run: Run) -> None:
        """The run is over, however it ended. The last line has the last evaluation."""
        if self._line is not None:
            self._line.stop()
        if self._measured.training and self._measured.evaluated_at > self._shown_evaluation:
            self._print_plain(run)

    def _print_plain(self, run: Run) -> None:
        if self._line is not None and self._line.disable:
            self._shown_evaluation = self._measured.evaluated_at
            parts = self._measured.parts(run.step) + _time_left(self._line.tasks[0])
            line = f"step {run.step}/{run.max_steps}  {' '.join(parts)}"
            run.console.print(line, soft_wrap=True, highlight=False)


class _Line(ProgressColumn):
    """Steps done, the time left and as many of the numbers as the terminal has room for: none is cut.

    Args:
        reserved: columns of the terminal for others.
    """

    def __init__(self, console: Console, measured: Measurements, *, reserved: int) -> None:
        self._console, self._measured, self._reserved = console, measured, reserved
        super().__init__()

    def render(self, task: Task) -> Text:
        """See `ProgressColumn.render`."""
        step, max_steps = round(task.completed), round(task.total or 0)
        parts = [f"{step}/{max_steps}", *_time_left(task), *self._measured.parts(step)]
        while len(parts) > 1 and len(" ".join(parts)) > self._console.width - self._reserved:
            parts.pop()
        return Text(" ".join(parts), no_wrap=True)


INDENT = 8
MAX_PART = 600
"""Characters of a turn that are shown."""


@dataclass(eq=False)
class ShowStart(Callback):
    """Prints what trains on what, where, and for how long, once the stage is known; readable at 80 columns, with and
    without colours."""

    ranks = "first"
    stages: RunStages
    sampler: GlobalBatchSampler
    """The sampler of the run's training."""
    validation_sets: Mapping[str, Any]
    num_eval_rows: int
    """Read by an evaluation of a large set."""
    verification: str = ""
    """A sentence on the steps that the run verifies; empty where it verifies none."""

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        engine, dataset, sampler, num_steps = run.engine, run.dataset, self.sampler, run.max_steps - run.step
        num_trained = sum(bucket.layout.numel for bucket in engine.schedule.trained)
        num_frozen = engine.num_parameters - num_trained
        rows = self._eval_rows(dataset.validation)
        sets = [f"{name}: {self._eval_rows(rows_of_set(data))}" for name, data in self.validation_sets.items()]
        decays = [
            f"{group['weight_decay']:g} on {num_parameters} {group['name']} ({numel:,})"
            for group, (num_parameters, numel) in zip(engine.param_groups, engine.group_sizes(), strict=True)
            if "weight_decay" in group and num_parameters
        ]
        lines = {
            "model": f"{type(engine.module).__name__}, {num_trained:,} parameters trained, {num_frozen:,} frozen",
            "data": _data(dataset),
            "padding": dataset.train.describe_padding(sampler) if hasattr(dataset.train, "describe_padding") else "",
            "eval": f"{rows} each time; train.eval_batches=all reads all" if " of " in rows else "",
            "sets": ", ".join(sets),
            "ranks": _ranks(engine),
            "memory": ", ".join([self.stages.describe(run.step), *_memory(engine, sampler.num_micro_batches)]),
            "buckets": "",
            "offload": "; ".join(_offloaded(engine, sampler.num_micro_batches)),
            "steps": _steps(sampler, dataset, num_steps),
            "decay": ", ".join(decays),
            "verify": self.verification,
        }
        if engine.options.holds_units:  # the device has chosen their size
            sizes = [bucket.layout.padded_numel * bucket.spec.dtype.itemsize for bucket in engine.schedule.buckets]
            lines["buckets"] = f"{len(sizes)}, the largest of {max(sizes) / 2**20:.4g} MiB (zero.bucket_mb=auto)"
        num_rows = sampler.rows_consumed + num_steps * sampler.global_batch_size
        if tokens_known(engine.module) is not None or hasattr(dataset, "decode"):
            lines["warning"] = _warning(dataset.train, num_rows)
        for name, line in lines.items():
            for number, part in enumerate(wrap_text(line, max(20, run.console.width - INDENT)) if line else ()):
                label = "" if number else name
                run.console.print(Text.assemble((f"{label:<{INDENT}}", "bold"), part), soft_wrap=True)
        if callable(getattr(dataset, "example", None)):
            in_colour = run.console.color_system is not None
            text = Text.assemble(
                ("learns the green parts of\n" if in_colour else "learns the parts in >> << of\n", "bold")
            )
            for part, is_learnt in dataset.example():
                shown = printable(part, MAX_PART, keep="\n")
                marked = f">>{shown}<<" if is_learnt and not in_colour else shown
                text.append(marked, "green" if is_learnt else "dim")
            run.console.print(text)

    def _eval_rows(self, rows: Any) -> str:
        """How many rows an evaluation reads, and of how many."""
        limit = f"{self.num_eval_rows:,} of " if self.num_eval_rows < len(rows) else ""
        return f"{limit}{len(rows):,} rows"


def _data(dataset: Any) -> str:
    name = type(dataset).__name__
    if callable(getattr(dataset, "summary", None)):
        return f"{name}: {dataset.summary()}"
    pieces = [name]
    for part, purpose in ((dataset.train, "to train on"), (dataset.validation, "to validate")):
        tokens = getattr(part, "tokens_per_sequence", None)
        count = f"{len(part):,} rows" if tokens is None else f"{len(part) * tokens:,} tokens"
        pieces.append(f"{count} {purpose}")
    return ", ".join(pieces)


def _warning(train: Any, num_rows: int) -> str:
    """How often the rows are read, of each source of a mix; empty where none are read more than once."""
    of_sources, repeats = hasattr(train, "times_read"), []
    for name, times in (train.times_read(num_rows) if of_sources else {"": num_rows / len(train)}).items():
        if times > 1:
            repeats.append(f"{f'of {name} ' if of_sources else ''}{times:.{1 if times < 100 else 0}f} times")
    if not repeats:
        return ""
    return f"the run reads each row {', '.join(repeats)}; more data or fewer train.max_steps avoid that"


def _ranks(engine: ZeroEngine) -> str:
    device = device_of(engine.world.device)
    matrices = ""
    if not device.is_host and not engine.precision.separate_master:
        is_fast = torch.backends.cuda.matmul.allow_tf32
        matrices = ", matrices in TF32" if is_fast else " (faster: precision.tf32=true or precision=bf16)"
    elif (matmul := engine.options.config.precision.matmul) is not None:
        matrices = f", matrices in {matmul}{', emulated' if device.is_host else ''}"
    line = f"{engine.world.size} on {device.name}; {engine.precision.name}{matrices}"
    if engine.options.zero.shard_size is not None and engine.world.size > 1:
        groups, ranks = engine.collectives.across.size, engine.collectives.inside.size
        is_mesh, got = groups > 1, f"zero.shard_size={engine.options.zero.shard_size}"
        line += f"; {groups} groups of {ranks} ranks, each with all parameters" if is_mesh else f"; {got}: all ranks"
    leaves = len(engine.virtual_ranks)
    if leaves > 1:
        line += f"; virtual ranks: {leaves * engine.world.size}, {leaves} on each"
        if engine.precision.separate_master:
            line += "; gradients are sent in fp32"
        if not engine.options.ordered:
            line += "; the bits depend on the number of ranks without zero.reduction=ordered"
    return line


def _memory(engine: ZeroEngine, num_micro_batches: int) -> Iterator[str]:
    held = engine.planned_nbytes()
    unit, unit_nbytes = unit_of(max(held.values()))
    of_each = ", ".join(
        f"{nbytes / unit_nbytes:.4g} {kind}" for kind, nbytes in held.items() if nbytes or kind != "offloaded"
    )
    yield f"{unit} of a rank: {of_each}"
    if sums := engine.sums_nbytes(num_micro_batches):
        is_large = sums > sum(held.values()) and len(engine.virtual_ranks) == 1
        instead = "; zero.accumulate=reduced would shard them" if is_large and engine.world.size > 1 else ""
        yield f"{sums / unit_nbytes:.4g} for sums of micro-batches{instead}"


def _offloaded(engine: ZeroEngine, num_micro_batches: int) -> Iterator[str]:
    for store in engine.offloaded(num_micro_batches * len(engine.virtual_ranks)):
        if store.has_activations:
            yield (
                f"activations in {store.where}, fetched at {in_unit(store.fetched_per_s)}/s and stored at "
                f"{in_unit(store.stored_per_s)}/s of a rank"
            )
        if store.nbytes == 0:
            continue
        yield (
            f"{in_unit(store.nbytes)} of a rank in {store.where}; a step fetches {in_unit(store.fetched_nbytes)} at "
            f"{in_unit(store.fetched_per_s)}/s and stores {in_unit(store.stored_nbytes)} at "
            f"{in_unit(store.stored_per_s)}/s, in {store.step_s:.2g} s, while it computes"
        )


def _steps(sampler: GlobalBatchSampler, dataset: Any, num_steps: int) -> str:
    rows, tokens = sampler.global_batch_size, getattr(dataset.train, "tokens_per_sequence", None)
    per_epoch = sampler.num_sequences / rows
    epoch = f"an epoch is {per_epoch:,.{0 if per_epoch >= 10 else 1}f} steps"
    if tokens is None:
        return f"{num_steps:,} of {rows:,} rows; {epoch}"
    per_step = rows * tokens
    return f"{num_steps:,} of {per_step:,} tokens, {num_steps * per_step:,} tokens to go; {epoch}"
