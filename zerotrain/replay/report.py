"""Names the virtual rank, micro-batch, parameter and row behind a step's loss and gradient."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.data import batches, fetch, mix, windows
from zerotrain.device.memory import give_back_freed
from zerotrain.files.untrusted import printable
from zerotrain.replay.record import Record
from zerotrain.replay.steps import ReplayedSteps
from zerotrain.training.sameness import seed_leaf

# The module behind the first value that is not finite, in the forward or in the backward.
#
# Modules without children are watched, in the order in which they run: a module whose inputs are finite and whose
# output is not has made it. In the backward the same holds of the gradient of its output and that of its input.


@contextmanager
def watching_for_nonfinite(model: torch.nn.Module) -> Iterator[list[str]]:
    """Watch a model around one forward and backward. The list gets a sentence on the first value that is not finite:
    the module that has made it, and what from."""
    sentences: list[str] = []

    def watch(name: str, module: torch.nn.Module, inputs: Any, keyword_inputs: Any, outputs: Any) -> None:
        called = f"{name} ({type(module).__name__})"
        for parameter, values in module.named_parameters(recurse=False):  # at stage 3 they are whole in here alone
            if not _is_finite(values):
                sentences.append(f"{name}.{parameter}, which was not finite before the step; replay an earlier one")
        arguments, results = _floats((inputs, keyword_inputs)), _floats(outputs)
        if not all(map(_is_finite, arguments)):
            sentences.append(f"the input of {called} in the forward, from outside it: {_listed(arguments)}")
        elif not all(map(_is_finite, results)):
            sentences.append(f"{called} in the forward, from the input {_listed(arguments) or 'of tokens'}")
        behind = partial(watch_gradient, f"what comes behind {called} in the backward; the gradient of its output")
        inside = partial(watch_gradient, f"{called} in the backward; the gradient of its input")
        for tensor in results:
            if tensor.requires_grad:
                tensor.register_hook(behind)
        for tensor in arguments:
            if tensor.requires_grad and all(tensor is not result for result in results):
                tensor.register_hook(inside)

    def watch_gradient(whose: str, gradient: torch.Tensor) -> None:
        if not sentences and not _is_finite(gradient):
            sentences.append(f"{whose}: {_listed([gradient])}")

    modules = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(partial(watch, name), with_kwargs=True) for name, module in modules]
    try:
        yield sentences
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _floats(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors in any structure."""
    return [tensor for tensor in fetch.tensors_in(values) if tensor.is_floating_point()]


def _listed(tensors: list[torch.Tensor]) -> str:
    return ", ".join(map(outlined, tensors))


def outlined(tensor: torch.Tensor) -> str:
    """A tensor in a few words, such as "float32 (2, 3) from -1 to 2, 1 of 6 not finite"."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    finite = tensor.detach()[tensor.isfinite()]
    words = f"{shape} from {finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else shape
    num_bad = tensor.numel() - finite.numel()
    return f"{words}, {num_bad} of {tensor.numel()} not finite" if num_bad else words


MAX_TEXT = 60
"""Characters to show of a row's text."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch of a step, or one of its rows, computed alone."""

    loss: float
    """Mean over its labels."""
    grad_norm: float
    """L2 norm of its own gradient, without the loss scale."""
    largest: str
    """The parameter with the largest element of the gradient, or the first in the backward that is not finite."""
    largest_value: float
    """Its absolute value."""

    @property
    def badness(self) -> tuple[bool, float]:
        """Larger for what stands out more: first what is not finite."""
        is_bad = not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))
        return is_bad, 0.0 if is_bad else self.grad_norm


@dataclass(frozen=True, kw_only=True)
class MicroBatchPart(Part):
    """See `Part`."""

    virtual_rank: int
    micro_batch: int
    """Number within the virtual rank."""
    rows: list[int]
    """Numbers of its rows in the dataset."""


@dataclass(kw_only=True)
class RowPart:
    """A row of the worst micro-batch."""

    row: int
    """Number in the dataset."""
    epoch: int
    source: str
    """Source of a mix, file and position, as far as the dataset tells."""
    text: str
    """The beginning of its text, or an outline of its tensors."""
    alone: Part | None = None
    """The row computed as a micro-batch of its own; None: nobody asked."""


@dataclass(kw_only=True)
class StepReport:
    """The parts of a step, before its update."""

    step: int
    parts: list[MicroBatchPart]
    rows: list[RowPart] = field(default_factory=list)
    """Those of `worst`."""
    nonfinite: str | None = None
    """The module with the first value that was not finite; None where all were."""

    @property
    def worst(self) -> MicroBatchPart:
        """The micro-batch that stands out: the first that is not finite, or that of the largest gradient."""
        return max(self.parts, key=lambda part: part.badness)

    def body(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"worst": asdict(self.worst)}


def report_of(steps: ReplayedSteps, *, each_row: bool) -> StepReport:
    """Compute each micro-batch of the next step alone, and train nothing.

    Args:
        each_row: compute each row of the worst micro-batch, too.
    """
    sampler = steps.trainer.feed.sampler
    report = StepReport(step=steps.num_done + 1, parts=[])
    for virtual_rank in range(sampler.num_virtual_ranks):
        inputs, _ = steps.trainer.feed.leaf(virtual_rank)
        for number, batch in enumerate(inputs):
            part = _compute_part(steps, batch, virtual_rank, number)
            rows = steps.trainer.feed.rows_of(virtual_rank, number).rows
            report.parts.append(MicroBatchPart(virtual_rank=virtual_rank, micro_batch=number, rows=rows, **vars(part)))
    worst = report.worst
    rows, epochs = steps.trainer.feed.rows_of(worst.virtual_rank, worst.micro_batch)
    for row, epoch in zip(rows, epochs, strict=True):
        read = steps.trainer.feed.read(batches.RowsToRead([row], [epoch]))
        source, text = _source(steps.trainer.dataset.train, row), _outline(steps.trainer.dataset, read)
        alone = _compute_part(steps, read, worst.virtual_rank, worst.micro_batch) if each_row else None
        report.rows.append(RowPart(row=row, epoch=epoch, source=source, text=text, alone=alone))
    if worst.badness[0]:
        inputs, _ = steps.trainer.feed.leaf(worst.virtual_rank)
        with watching_for_nonfinite(steps.trainer.engine.module) as sentences:
            part = _compute_part(steps, inputs[worst.micro_batch], worst.virtual_rank, worst.micro_batch)
        between = f"no module, but what lies between them: the first in the backward is the gradient of {part.largest}"
        scale = steps.trainer.engine.loss_scale
        report.nonfinite = [*sentences, between][0] + (f", with a loss scale of {scale:g}" if scale != 1.0 else "")
    return report


def batch_of(steps: ReplayedSteps, virtual_rank: int, micro_batch: int) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch of the next step by name, for a file of safetensors."""
    inputs, _ = steps.trainer.feed.leaf(virtual_rank)
    batch = inputs[micro_batch]
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {str(name): value.detach().cpu().contiguous() for name, value in items if isinstance(value, torch.Tensor)}


def _compute_part(steps: ReplayedSteps, inputs: Any, virtual_rank: int, micro_batch: int) -> Part:
    """Forward and backward of a micro-batch alone, with its seeds in the step."""
    losses: list[torch.Tensor] = []
    seed_each = partial(seed_leaf, steps.trainer.seed, steps.num_done)
    gradients = steps.trainer.engine.leaf(
        virtual_rank,
        [inputs],
        weights=[1.0],
        before_each=lambda number, _: seed_each(number, micro_batch),
        after_each=lambda _number, _index, loss, _outputs: losses.append(loss),
    )
    scale, squares = steps.trainer.engine.loss_scale, 0.0
    largest, name_of_largest, first_bad = -1.0, "", ""
    for name, _ in steps.trainer.engine.module.named_parameters():
        if (gradient := gradients.get(name)) is None:
            continue
        squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        top = float(gradient.abs().max()) if gradient.numel() else 0.0
        if not math.isfinite(top):
            first_bad = name  # the last of the model comes first in the backward
        elif top > largest:
            largest, name_of_largest = top, name
    part = Part(
        loss=float(losses[0]),
        grad_norm=math.sqrt(squares) / scale if math.isfinite(squares) else math.nan,
        largest=first_bad or name_of_largest,
        largest_value=math.nan if first_bad else largest / scale,
    )
    del gradients
    give_back_freed()  # as large as the model: what stays of it in the heap does not fit the next one
    return part


def _source(dataset: Any, row: int) -> str:
    """The place of a row of the data, as far as the dataset tells."""
    if isinstance(dataset, mix.MixedRows):
        name, rows, number = dataset.source_of(row)
        return f"{name}: {_source(rows, number) or f'row {number}'}"
    if isinstance(dataset, windows.TokenWindows):
        starts, _ = dataset.layout.parts(np.array([row]))
        return dataset.store.origin(int(starts[0]))
    return ""


def _outline(dataset: Any, inputs: Any) -> str:
    """The text of a row, or the shapes and ranges of its tensors."""
    ids = fetch.ids_of(inputs)
    if ids is not None and ids.dtype == torch.int64 and callable(getattr(dataset, "decode", None)):
        text = printable(dataset.decode(ids.flatten()), keep="")
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return _listed(fetch.tensors_in(inputs))


# The result of a replay, as tables and lines.


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
    heads = ("virtual rank", "micro-batch", "loss", "gradient", "largest in", "")
    table = Table(*heads, title=f"step {report.step}", box=box.SIMPLE_HEAD)
    for part in report.parts:
        place = (str(part.virtual_rank), str(part.micro_batch))
        bar = "!" * BAR
        if math.isfinite(part.grad_norm):  # where the worst is not, its own bar is enough
            bar = "█" * round(BAR * part.grad_norm / (worst.grad_norm or 1.0)) if math.isfinite(worst.grad_norm) else ""
        table.add_row(*place, *_numbers(part), Text(part.largest), bar, style="bold" if part is worst else "")
    console.print(table)
    rows = Table(title="rows of the micro-batch that stands out", box=box.SIMPLE_HEAD)
    alone = ("loss", "gradient") if report.rows[0].alone else ()
    for name in ("row", "where", *alone, "text"):
        rows.add_column(name, overflow="fold")  # a path has no spaces to break it at
    for row in report.rows:
        numbers = _numbers(row.alone) if row.alone else ()
        rows.add_row(str(row.row), Text(printable(row.source, keep="")), *numbers, Text(row.text))
    console.print(rows)
    lines = [] if report.nonfinite is None else [f"first not finite: {report.nonfinite}"]
    compared = [step for step in record.steps if began_at < step <= report.step]
    if differs is not None:
        lines.append(differs)
        lines += [f"  {cause}" for cause in causes or [NOTHING_RECORDED]]
    elif compared:
        steps = f"{len(compared)} {'steps' if len(compared) > 1 else 'step'}"
        lines.append(f"{steps} from step {began_at + 1} on: as the run recorded, to the bit")
    if report.step not in record.steps:
        lines.append(f"step {report.step} is not recorded: nothing to compare it with")
    for line in lines:
        console.print(Text(printable(line, keep="")), soft_wrap=True)
    sys.stdout.flush()


def print_around(console: Console, steps: Sequence[Mapping[str, Any]], step: int) -> None:
    """Print a row for each step, the one asked for in bold."""
    heads = ("step", "loss", "gradient", "clipped to", "learning rate", "the run")
    table = Table(*heads, title="steps around it", box=box.SIMPLE_HEAD)
    for line in steps:
        clipped = "skipped" if line["skipped"] else _number(line["grad_norm"] * line["clip_coefficient"])
        same = {None: "not recorded", True: "the same", False: "differs"}[line["as_recorded"]]
        numbers = map(_number, (line["loss"], line["grad_norm"]))
        style = "bold" if line["step"] == step else ""
        table.add_row(str(line["step"]), *numbers, clipped, _number(line["lr"]), same, style=style)
    console.print(table)


def _numbers(part: Part) -> tuple[str, str]:
    return _number(part.loss), _number(part.grad_norm)


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
