"""Evaluations of a run: the validation loss and metrics, at their steps."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.data import fetch
from zerotrain.data.items import source_name
from zerotrain.device.kinds import device_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.engine.step import call_model, loss_in, require_loss
from zerotrain.files.untrusted import printable
from zerotrain.training.callback import Callback, Run
from zerotrain.training.metrics.metric import Metric, MetricStates

ROWS_PER_EVAL_BATCH = 8
"""Rows of one of `train.eval_batches`. It is fixed: the validation rows must not depend on ranks."""


class RunEvaluation(Callback):
    """The evaluations of one run: the same sequences each time. Warns once of a loss of nan.

    Args:
        num_batches: of `ROWS_PER_EVAL_BATCH` sequences; "all" reads all.
        dataset: the validation set; there are no evaluations of an empty one.
        validation_sets: further data by name, of which `rows_of_set` are evaluated too.
        every: steps between two in training, with one before the first step; 0: after the last step alone.
        evaluated_at: steps done when the model was evaluated last; None: never.
        arguments: for `evaluate_sources`.
    """

    def __init__(
        self,
        console: Console,
        *,
        num_batches: int | str,
        dataset: Any,
        validation_sets: Mapping[str, Any] | None = None,
        every: int = 0,
        evaluated_at: int | None = None,
        **arguments: Any,
    ) -> None:
        self._console, self._has_warned = console, False
        self._every, self._evaluated_at = every, evaluated_at
        self._dataset = dataset if len(dataset) else None
        self._sets = {name: rows_of_set(data) for name, data in (validation_sets or {}).items()}
        self._evaluate = partial(evaluate_sources, num_sequences=num_eval_rows(num_batches), **arguments)

    def start(self, run: Run) -> None:
        """Evaluate where it is due before the next step: the first of all, or one that a stop came before."""
        is_owed = run.is_due(self._every) and self._evaluated_at != run.step
        if is_owed if run.step else self._every > 0:
            self._evaluate_in(run)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.is_due(self._every) and not run.stopped_by:
            self._evaluate_in(run)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"evaluated_at": self._evaluated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._evaluated_at = state["evaluated_at"]

    def _evaluate_in(self, run: Run) -> None:
        with run.engine.averaged() if run.evaluates_average else nullcontext():
            metrics = self.metrics_after(run.step)
        if not metrics:
            return
        run.result.final_val_loss, run.result.val_loss_by_source = metrics.get("val_loss"), sources_in(metrics) or None
        val_metrics = {name: value for name, value in metrics.items() if name.partition("/")[0] != "val_loss"}
        run.result.val_metrics = val_metrics or None
        self._evaluated_at = run.step
        run.log(metrics)
        run.callbacks.call("after_evaluation", run, metrics)

    def metrics_after(self, step: int) -> dict[str, float]:
        """The metrics after so many steps, as of `evaluate_sources`; with "/NAME" those of further sets. Collective."""
        metrics = {} if self._dataset is None else self._evaluate(dataset=self._dataset, step=step)
        for name, rows in self._sets.items():
            set_metrics = self._evaluate(dataset=rows, step=step, name=f"data.validation_sets.{name}")
            metrics |= {in_set(metric, name): value for metric, value in set_metrics.items()}
        losses = {"val_loss": metrics.get("val_loss", 0.0)} | sources_in(metrics)
        nans = [name for name, loss in losses.items() if math.isnan(loss)]
        if nans and not self._has_warned:
            self._has_warned = True
            source = "" if nans[0] == "val_loss" else f" of {printable(nans[0])}"
            self._console.print(
                f"warning: the validation loss{source} is nan: all validation labels are ignored, or the model's loss "
                "is nan",
                highlight=False,
            )
        return metrics


def num_eval_rows(num_batches: int | str) -> int:
    """The rows of an evaluation by `train.eval_batches`, if the dataset has as many."""
    return 2**63 - 1 if isinstance(num_batches, str) else num_batches * ROWS_PER_EVAL_BATCH


def rows_of_set(data: Any) -> Any:
    """The rows of further data to evaluate: its validation, or all where it has none."""
    return data.validation if len(data.validation) else data.train


def in_set(metric: str, name: str) -> str:
    """The name of a metric of a further validation set: "val_loss/docs", and "val_loss/docs/a" of a source of it."""
    metric, *source = metric.split("/", 1)
    return "/".join([metric, name, *source])


def sources_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """The loss of each source and further validation set, by its name."""
    return {name.removeprefix("val_loss/"): value for name, value in metrics.items() if name.startswith("val_loss/")}


def evaluate_sources(
    *, dataset: Any, num_sequences: int, name: str = "data.validation", **arguments: Any
) -> dict[str, float]:
    """Mean loss and metrics over a validation set, and over each source of a mix. Collective.

    Args:
        dataset: the validation set. One with `sources`, {name: dataset}, and `weights`, {name: weight}, is evaluated
            source by source; each reads its share of the sequences, at least one.
        num_sequences: how many sequences are read, over all ranks and sources.
        name: of the set, for messages.
        arguments: as for `evaluate_all`.

    Returns:
        {"val_loss": loss}, "val_" and its name for each metric, and with "/NAME" the same of each source. Those of all
        sources are the mean of theirs by the weights: that of the mix which is trained on, also where a source has
        fewer sequences than its share.
    """
    sources: dict[str, Any] = getattr(dataset, "sources", {})
    if not sources:
        return evaluate_all(dataset=dataset, num_sequences=num_sequences, name=name, **arguments)
    total = sum(dataset.weights.values())
    shares = {name: weight / total for name, weight in dataset.weights.items()}
    by_source: dict[str, dict[str, float]] = {}
    for source, rows in sources.items():
        share = max(1, round(num_sequences * shares[source]))
        called = source_name(name, source)
        by_source[source] = evaluate_all(dataset=rows, num_sequences=share, name=called, **arguments)
    # A source that weighs nothing may have any loss, nan too.
    metrics = next(iter(by_source.values()))
    mean = {
        metric: sum(shares[source] * values[metric] for source, values in by_source.items() if shares[source])
        for metric in metrics
    }
    return mean | {f"{metric}/{source}": values[metric] for metric in metrics for source, values in by_source.items()}


def evaluate_all(
    *,
    engine: ZeroEngine,
    world: World,
    dataset: Any,
    num_sequences: int,
    micro_batch_size: int,
    seed: int = 0,
    step: int = 0,
    collate: fetch.Collate | None = None,
    name: str = "data.validation",
    metrics: Mapping[str, Metric] | None = None,
    loss_over: str = fetch.AUTO,
) -> dict[str, float]:
    """Mean loss of the same validation sequences, and metrics, the same bits at any number of ranks. Collective.

    Args:
        num_sequences: how many of the dataset's are read, over all ranks.
        micro_batch_size: sequences of one rank's forward.
        seed: of the run, which follows what a dataset draws for its items: in every evaluation the same.
        step, name: steps done and the dataset's name, for messages.
        collate: makes a batch of a list of items; None: torch's `default_collate`.
        metrics: by name.
        loss_over: what the model's loss is the mean over, as `train.loss_over`.

    Returns:
        {"val_loss": loss}, and "val_" with its name for each metric. nan where nothing weighs anything.

    Raises:
        RowError: an item could not be read.
        CallbackError: a metric has raised.

    Random numbers drawn in here (a dataset that augments, a model that samples) leave the generators of this process as
    they were: the number of evaluations must not change the training.
    """
    rows = validation_rows(len(dataset), num_sequences)
    num_rounds = max(1, math.ceil(len(rows) / (world.size * micro_batch_size)))
    counted, weigh = fetch.weighing_of(loss_over, engine.module)
    where, adds_up = f"evaluation after step {step}", counted == fetch.SUM
    measured = MetricStates(metrics or {}, "val_", where, engine.module, adds_up=adds_up)
    targets = {metric.target for metric in (metrics or {}).values() if metric.needs_outputs}
    gives_both = measured.needs_outputs and fetch.gives_outputs(engine.module)
    vocab_size = fetch.tokens_known(engine.module)
    read_batch = partial(
        fetch.fetch_rows, dataset, seed=seed, step=step, collate=collate, name=name, vocab_size=vocab_size
    )
    with (
        torch.no_grad(),
        device_of(world.device).keep_generators(),
        in_evaluation_mode(engine),
        fetch.in_time(world.timeout_s),
    ):
        for number in range(world.rank, num_rounds * world.size, world.size):
            own_rows = rows[number * micro_batch_size : (number + 1) * micro_batch_size]
            # A rank that has no row left runs a forward all the same and counts nothing of it: where parameters are
            # sharded, the others need its part of them.
            read = own_rows or [0]
            batch = read_batch(read, epochs=[0] * len(read))
            weight, num_counted = 0.0, 0
            if own_rows:
                weight, num_counted = weigh(batch, len(own_rows)), fetch.num_labels(batch, len(own_rows))
            batch = fetch.to_device(batch, world.device)
            if gives_both:
                loss, outputs = call_model(engine, fetch.as_inputs(batch), with_outputs=True)
            else:
                loss, outputs = loss_in(call_model(engine, fetch.as_inputs(batch))), None
            require_loss(loss, type(engine.module).__name__)
            if measured.needs_outputs and not gives_both:
                outputs = call_model(engine, fetch.without_targets(batch, targets))
            measured.add(number, loss, weight, outputs, batch, num_counted)
        return measured.values(engine.collectives)


@contextmanager
def in_evaluation_mode(engine: ZeroEngine) -> Iterator[None]:
    """Inside, all modules are in evaluation mode; afterwards each is in the mode in which it was: a user may have left
    some in evaluation mode, such as the batch norms of a frozen backbone."""
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def validation_rows(num_available: int, num_wanted: int) -> list[int]:
    """The sequences of an evaluation: as many as wanted, or all, evenly spread over the validation set."""
    num_rows = min(num_available, num_wanted)
    return [row * num_available // num_rows for row in range(num_rows)]
