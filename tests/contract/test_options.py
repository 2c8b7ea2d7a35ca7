"""The names of all settings are frozen: command lines, yaml files and other people's tools are written with them.

When this fails on purpose: change the list below, say in CHANGELOG.md what a user must now write, and look whether the
tables of README.md and the docs still hold, and write docs/reference/settings.md anew.
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from zerotrain.config.compose import register_schema

CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = """
    seed
    zero.stage
    zero.bucket_mb
    zero.overlap
    zero.prefetch
    zero.reduction
    zero.accumulate
    zero.units
    zero.reshard_after_forward
    zero.schedule
    precision.name
    precision.keep_fp32
    precision.initial_scale
    precision.growth_interval
    precision.tf32
    offload.optimizer
    offload.parameters
    offload.activations
    offload.keep
    offload.update
    offload.path
    model.compile
    model.activation_checkpointing
    model.freeze
    model._target_
    model.vocab_size
    model.max_seq_len
    model.num_layers
    model.num_heads
    model.hidden_size
    model.dropout
    model.vocab_multiple
    model.loss_chunks
    data.num_workers
    data.collate_fn
    data.validation_sets
    data._target_
    data.path
    data.seq_len
    data.vocab_size
    data.tokenizer
    data.document_end
    data.text_field
    data.validation_fraction
    data.cache_dir
    optimizer.groups
    optimizer.whole_tensor
    optimizer._target_
    optimizer._partial_
    optimizer.lr
    optimizer.betas
    optimizer.eps
    optimizer.weight_decay
    optimizer.fused
    scheduler._target_
    scheduler._partial_
    scheduler.warmup_steps
    scheduler.final_fraction
    train.max_steps
    train.num_epochs
    train.max_tokens
    train.micro_batch_size
    train.gradient_accumulation_steps
    train.loss_over
    train.virtual_ranks
    train.max_grad_norm
    train.on_nonfinite
    train.max_skipped_steps
    train.eval_every
    train.eval_batches
    train.log_every
    train.sample_tokens
    train.sample_prompts
    train.deterministic
    train.profile
    train.memory_snapshot
    checkpoint.every
    checkpoint.keep
    checkpoint.keep_every
    checkpoint.best
    checkpoint.asynchronous
    checkpoint.resume
    checkpoint.init_from
    checkpoint.strict
    checkpoint.save_at_end
    launch.nproc_per_node
    launch.device
    launch.threads_per_rank
    launch.timeout_s
    launch.start_timeout_s
    launch.interface
    launch.max_restarts
    launch.overwrite
    launch.exit_code_when_stopped
    launch.requeue
    plan.only
    plan.compare
    plan.num_ranks
    plan.memory_gb
    sweep.again
    sweep.diverged
    sweep.max_failures_in_a_row
    sweep.output
    sweep.jobs
    sweep.objective
    sweep.direction
    sweep.pruner
"""


def test_the_default_config_has_these_options_and_no_others():
    register_schema()
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = hydra.compose("train")
    assert flattened(OmegaConf.to_container(composed)) == OPTIONS.split()


def flattened(values: dict[Any, Any], prefix: str = "") -> list[str]:
    """The dotted names of all values, in order."""
    names = []
    for name, value in values.items():
        names += flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return names
