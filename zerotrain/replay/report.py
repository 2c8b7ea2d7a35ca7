"""Which virtual rank, micro-batch, parameter and row a step's loss and gradient came from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from zerotrain.data.batches import RowsToRead
from zerotrain.data.fetch import ids_of, with_tensors
from zerotrain.data.mix import MixedRows
from zerotrain.data.windows import TokenWindows
from zerotrain.device.memory import give_back_freed
from zerotrain.files.untrusted import printable
from zerotrain.replay.nonfinite import FirstNonFinite, outlined
from zerotrain.replay.steps import ReplayedSteps
from zerotrain.training.sameness import seed_leaf

MAX_TEXT = 60
"""Characters of a row's text that are shown."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch of a step, or one of its rows, computed alone."""

    loss: float
    """Mean over its labels."""
    grad_norm: float
    """L2 norm of its own gradient, without the loss scale."""
    largest: str
    """The parameter that has the largest element of the gradient, or the first that is not finite in the backward."""
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
    """A row of the micro-batch that stands out."""

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
    """The module that made the first value that was not finite; None where all were."""

    @property
    def worst(self) -> MicroBatchPart:
        """The micro-batch that stands out: the first that is not finite, or that of the largest gradient."""
        return max(self.parts, key=lambda each: each.badness)

    def body(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"worst": asdict(self.worst)}


def report_of(steps: ReplayedSteps, *, each_row: bool) -> StepReport:
    """Compute each micro-batch of the next step alone, and trains nothing.

    Args:
        each_row: compute each row of the micro-batch that stands out, too.
    """
    sampler = steps.feed.sampler
    report = StepReport(step=steps.done + 1, parts=[])
    for virtual_rank in range(sampler.num_virtual_ranks):
        inputs, _ = steps.feed.leaf(virtual_rank)
        for number, each in enumerate(inputs):
            part = _computed(steps, each, virtual_rank, number)
            rows = steps.feed.rows_of(virtual_rank, number).rows
            report.parts.append(MicroBatchPart(virtual_rank=virtual_rank, micro_batch=number, rows=rows, **vars(part)))
    worst = report.worst
    rows, epochs = steps.feed.rows_of(worst.virtual_rank, worst.micro_batch)
    for row, epoch in zip(rows, epochs, strict=True):
        read = steps.feed.read(RowsToRead([row], [epoch]))
        source, text = _source(steps.dataset.train, row), _outline(steps.dataset, read)
        alone = _computed(steps, read, worst.virtual_rank, worst.micro_batch) if each_row else None
        report.rows.append(RowPart(row=row, epoch=epoch, source=source, text=text, alone=alone))
    if worst.badness[0]:
        inputs, _ = steps.feed.leaf(worst.virtual_rank)
        with FirstNonFinite(steps.engine.module) as first:
            found = _computed(steps, inputs[worst.micro_batch], worst.virtual_rank, worst.micro_batch)
        report.nonfinite = first.told(found.largest, steps.engine.loss_scale)
    return report


def batch_of(steps: ReplayedSteps, virtual_rank: int, micro_batch: int) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch of the next step by name, for a file of safetensors."""
    inputs, _ = steps.feed.leaf(virtual_rank)
    given = inputs[micro_batch]
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    return {str(name): each.detach().cpu().contiguous() for name, each in named if isinstance(each, torch.Tensor)}


def _computed(steps: ReplayedSteps, inputs: Any, virtual_rank: int, micro_batch: int) -> Part:
    """Forward and backward of a micro-batch alone, with the seeds that it has in the step."""
    losses: list[torch.Tensor] = []
    seed_each = partial(seed_leaf, steps.seed, steps.done)
    gradients = steps.engine.leaf(
        virtual_rank,
        [inputs],
        weights=[1.0],
        before_each=lambda number, _: seed_each(number, micro_batch),
        after_each=lambda _number, _index, loss, _outputs: losses.append(loss),
    )
    scale, squares = steps.engine.loss_scale, 0.0
    largest, name_of_largest, first_bad = -1.0, "", ""
    for name, _ in steps.engine.module.named_parameters():
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
    if isinstance(dataset, MixedRows):
        name, rows, number = dataset.source_of(row)
        return f"{name}: {_source(rows, number) or f'row {number}'}"
    if isinstance(dataset, TokenWindows):
        starts, _ = dataset.layout.parts(np.array([row]))
        return dataset.store.origin(int(starts[0]))
    return ""


def _outline(dataset: Any, inputs: Any) -> str:
    """The text of a row, or the shapes and ranges of its tensors."""
    ids = ids_of(inputs)
    if ids is not None and ids.dtype == torch.int64 and callable(getattr(dataset, "decode", None)):
        text = printable(dataset.decode(ids.flatten()), keep="")
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    told: list[str] = []

    def outline(tensor: torch.Tensor) -> torch.Tensor:
        told.append(outlined(tensor))
        return tensor

    with_tensors(inputs, outline)
    return ", ".join(told)
