"""Describes a run, in a few lines before its first step."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.fetch import tokens_known
from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.evaluation import rows_of_set
from zerotrain.training.callbacks.stages import RunStages
from zerotrain.training.figures.report import UNITS, in_unit, wrapped

INDENT = 8


class ShowStart(Callback):
    """Prints the lines of a start, once the stage is known."""

    ranks = "first"

    def __init__(
        self, stages: RunStages, sampler: GlobalBatchSampler, validation_sets: Mapping[str, Any], num_eval_rows: int
    ) -> None:
        self._stages, self._sampler = stages, sampler
        self._validation_sets, self._num_eval_rows = validation_sets, num_eval_rows

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        print_start(
            run.console,
            engine=run.engine,
            dataset=run.dataset,
            validation_sets=self._validation_sets,
            num_eval_rows=self._num_eval_rows,
            sampler=self._sampler,
            plan_name=self._stages.named(run.step),
            num_steps=run.max_steps - run.step,
        )


def print_start(
    console: Console,
    *,
    engine: ZeroEngine,
    dataset: Any,
    validation_sets: Mapping[str, Any],
    num_eval_rows: int,
    sampler: GlobalBatchSampler,
    plan_name: str,
    num_steps: int,
) -> None:
    """Print what trains on what, where, and for how long; readable at 80 columns, with and without colours.

    Args:
        num_eval_rows: that an evaluation reads of a set that has as many.
        sampler: of the run's training.
        plan_name: how the memory is shared, such as "stage 2".
        num_steps: steps to go.
    """
    read = _read_of(dataset.validation, num_eval_rows)
    lines = {
        "model": _model(engine),
        "data": _data(dataset),
        "eval": f"{read} each time; train.eval_batches=all reads all" if " of " in read else "",
        "sets": ", ".join(
            f"{name}: {_read_of(rows_of_set(each), num_eval_rows)}" for name, each in validation_sets.items()
        ),
        "ranks": _ranks(engine),
        "memory": ", ".join(_memory(engine, plan_name, sampler.num_micro_batches)),
        "buckets": _buckets(engine),
        "offload": "; ".join(_offloaded(engine, sampler.num_micro_batches)),
        "steps": _steps(sampler, dataset, num_steps),
        "decay": ", ".join(_decay(engine)),
    }
    num_rows = sampler.rows_consumed + num_steps * sampler.global_batch_size
    is_of_text = tokens_known(engine.module) is not None or hasattr(dataset, "decode")
    if is_of_text and (repeated := ", ".join(_repeated(dataset.train, num_rows))):
        lines["warning"] = f"the run reads each row {repeated}; more data or fewer train.max_steps avoid that"
    for name, line in lines.items():
        if not line:
            continue
        for number, part in enumerate(wrapped(line, max(20, console.width - INDENT))):
            label = "" if number else name
            console.print(Text.assemble((f"{label:<{INDENT}}", "bold"), part), soft_wrap=True)


def _model(engine: ZeroEngine) -> str:
    trained = sum(bucket.layout.numel for bucket in engine.schedule.trained)
    frozen = engine.num_parameters - trained
    return f"{type(engine.module).__name__}, {trained:,} parameters trained, {frozen:,} frozen"


def _data(dataset: Any) -> str:
    name = type(dataset).__name__
    if callable(getattr(dataset, "summary", None)):
        return f"{name}: {dataset.summary()}"
    return ", ".join([name, *_lengths(dataset)])


def _read_of(rows: Any, num_eval_rows: int) -> str:
    """How many rows an evaluation reads, and of how many."""
    return f"{num_eval_rows:,} of {len(rows):,} rows" if num_eval_rows < len(rows) else f"{len(rows):,} rows"


def _lengths(dataset: Any) -> Iterator[str]:
    for part, purpose in ((dataset.train, "to train on"), (dataset.validation, "to validate")):
        tokens = getattr(part, "tokens_per_sequence", None)
        count = f"{len(part):,} sequences" if tokens is None else f"{len(part) * tokens:,} tokens"
        yield f"{count} {purpose}"


def _repeated(train: Any, num_rows: int) -> Iterator[str]:
    """How often the rows are read, of each source of a mix, where that is more than once."""
    of_sources = hasattr(train, "times_read")
    for name, times in (train.times_read(num_rows) if of_sources else {"": num_rows / len(train)}).items():
        if times > 1:
            yield f"{f'of {name} ' if of_sources else ''}{times:.{1 if times < 100 else 0}f} times"


def _ranks(engine: ZeroEngine) -> str:
    device = device_of(engine.world.device)
    matrices = ""
    if not device.is_host and not engine.precision.separate_master:
        is_fast = torch.backends.cuda.matmul.allow_tf32
        matrices = ", matrices in TF32" if is_fast else " (faster: precision.tf32=true or precision=bf16)"
    return f"{engine.world.size} on {device.name}; {engine.precision.name}{matrices}{_leaves(engine)}"


def _leaves(engine: ZeroEngine) -> str:
    leaves = len(engine.virtual_ranks)
    if leaves == 1:
        return ""
    sent = "; gradients are sent in fp32" if engine.precision.separate_master else ""
    order = "" if engine.options.ordered else "; the bits depend on the number of ranks without zero.reduction=ordered"
    return f"; virtual ranks: {leaves * engine.world.size}, {leaves} on each{sent}{order}"


def _buckets(engine: ZeroEngine) -> str:
    """How many buckets there are, and the largest, where the device has chosen their size."""
    if not engine.options.holds_units:
        return ""
    nbytes = [bucket.layout.padded_numel * bucket.spec.dtype.itemsize for bucket in engine.schedule.buckets]
    return f"{len(nbytes)}, the largest of {max(nbytes) / 2**20:.4g} MiB (zero.bucket_mb=auto)"


def _memory(engine: ZeroEngine, plan_name: str, num_micro_batches: int) -> Iterator[str]:
    """By formulas: the optimizer's state is not there yet."""
    held = engine.planned_nbytes()
    unit, unit_nbytes = next((unit for unit in UNITS if max(held.values()) >= unit[1]), UNITS[-1])
    of_each = ", ".join(
        f"{nbytes / unit_nbytes:.4g} {kind}" for kind, nbytes in held.items() if nbytes or kind != "offloaded"
    )
    yield plan_name
    yield f"{unit} of a rank: {of_each}"
    if sums := engine.sums_nbytes(num_micro_batches):
        is_large = sums > sum(held.values()) and len(engine.virtual_ranks) == 1
        instead = "; zero.accumulate=reduced would shard them" if is_large and engine.world.size > 1 else ""
        yield f"{sums / unit_nbytes:.4g} for sums of micro-batches{instead}"


def _offloaded(engine: ZeroEngine, num_micro_batches: int) -> Iterator[str]:
    for each in engine.offloaded(num_micro_batches * len(engine.virtual_ranks)):
        if each.has_activations:
            yield (
                f"activations in {each.where}, fetched at {in_unit(each.fetched_per_s)}/s and stored at "
                f"{in_unit(each.stored_per_s)}/s of a rank"
            )
        if each.nbytes == 0:
            continue
        yield (
            f"{in_unit(each.nbytes)} of a rank in {each.where}; a step fetches {in_unit(each.fetched_nbytes)} at "
            f"{in_unit(each.fetched_per_s)}/s and stores {in_unit(each.stored_nbytes)} at "
            f"{in_unit(each.stored_per_s)}/s, in {each.step_s:.2g} s, while it computes"
        )


def _steps(sampler: GlobalBatchSampler, dataset: Any, num_steps: int) -> str:
    sequences, tokens = sampler.global_batch_size, getattr(dataset.train, "tokens_per_sequence", None)
    per_epoch = sampler.num_sequences / sequences
    epoch = f"an epoch is {per_epoch:,.{0 if per_epoch >= 10 else 1}f} steps"
    if tokens is None:
        return f"{num_steps:,} of {sequences:,} sequences; {epoch}"
    each = sequences * tokens
    return f"{num_steps:,} of {each:,} tokens, {num_steps * each:,} tokens to go; {epoch}"


def _decay(engine: ZeroEngine) -> Iterator[str]:
    """The parameters with weight decay, which no table of the settings shows."""
    for group, (num_parameters, numel) in zip(engine.param_groups, engine.group_sizes(), strict=True):
        if "weight_decay" in group and num_parameters:
            yield f"{group['weight_decay']:g} on {num_parameters} {group['name']} ({numel:,})"
