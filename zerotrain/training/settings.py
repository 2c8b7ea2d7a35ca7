"""The settings of a training loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.data.fetch import AUTO, Collate
from zerotrain.engine.engine import ZeroEngine
from zerotrain.training.callback import Callback
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.figures.flops import ModelFlops
from zerotrain.training.figures.sinks import MetricSink


@dataclass(kw_only=True)
class TrainerSettings:
    """Arguments of a `Trainer`; those of numbers have the names of the `train` settings."""

    engine: ZeroEngine
    """Around a model with forward(ids, labels) -> mean loss and forward(ids) -> logits."""
    world: World
    dataset: Any
    """Map-style datasets `train` and `validation` of what the model takes; see `zerotrain.data`."""
    validation_sets: Mapping[str, Any] = field(default_factory=dict)
    """Further data of the same kind, by name, that is evaluated beside the validation of `dataset`."""
    schedule: Callable[[int, int], float]
    """(updates done, max_steps) -> factor on the learning rate. A skipped step is no update."""
    stages: Mapping[int, int] = field(default_factory=dict)
    """Steps done, and the ZeRO stage from there on: {500: 3}. Before the first entry the engine's own."""
    frozen: Mapping[str, int | None] = field(default_factory=dict)
    """Parameters that the settings freeze, by first name: the steps for which they do not train; None: all."""
    seed: int
    """Seed of the data's order and of the sample of text."""
    max_steps: int
    """Global batches to train on, those of skipped steps and of steps before `first_step` included."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_every: int
    eval_batches: int | str
    """Of `ROWS_PER_EVAL_BATCH` rows, or "all" rows."""
    log_every: int
    sample_tokens: int
    run_dir: Path
    """Exists; rank 0 writes metrics.jsonl and result.json there."""
    run_facts: dict[str, Any]
    """Settings that result.json repeats: {stage, overrides, config_hash}."""
    sample_prompts: Sequence[str] | None = None
    """Texts to continue at the end; None: the beginning of the validation text."""
    profile: bool = False
    memory_snapshot: bool = False
    model_flops: ModelFlops | None = None
    """For MFU; None where it is not known."""
    console: Console = field(default_factory=Console)
    """Rank 0 shows its progress there."""
    sinks: Sequence[MetricSink] = ()
    """Rank 0 sends metrics there, beside metrics.jsonl and the console; `run` closes them. See `ResumableSink`."""
    exit_code_when_stopped: int | None = None
    """`exit_code` in result.json after a stop by a signal; None: 130 for SIGINT, else 0."""
    begin: Callable[[int], None] = lambda step: None
    """Told the number of each step, from 1, as it begins."""
    num_workers: int = 0
    """Processes that read the training data ahead."""
    collate_fn: Collate | None = None
    """Makes a batch of items; None: torch's default_collate."""
    loss_over: str = AUTO
    """What the loss of a micro-batch is the mean over, and so what it weighs in a step; see `TrainConfig`."""
    data_checked: Mapping[str, Any] | None = None
    """Fingerprint of the data when it was checked, see `zerotrain.data.fetch`; None if it was not."""
    data_state: Mapping[str, Any] | None = None
    """The run's position in the data: {rows_consumed, seed, order_version, fingerprint}. The run goes on at the given
    position, with whatever ranks and batch size; None: behind `first_step` batches of this size. After each step it is
    the position behind that step."""
    first_step: int = 0
    """Global batches that the engine was trained on before; metrics.jsonl is gone on with where it is there."""
    skipped_before: int = 0
    """Those of them that were skipped, which are no updates to the schedule."""
    checkpoint: CheckpointPolicy | None = None
    """When to save, and what to go on from; None: neither."""
    settings: Mapping[str, Any] | None = None
    """The run's settings as checkpoints note them: nested dicts of values that JSON can hold."""
    pruning: Callback | None = None
    """Ends a job of a sweep that is worse than the others: `zerotrain.training.pruning`."""
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    """The user's own by name, the same on all ranks; they are called in this order."""
