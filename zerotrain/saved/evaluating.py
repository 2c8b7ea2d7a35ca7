"""One rank of an evaluation: it joins the others, loads weights, and computes their loss and metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zerotrain.comm.ledger import Tell, tell_log
from zerotrain.config.schema import Config
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files.kept_out import nothing_imported_from
from zerotrain.run import factory
from zerotrain.training.callbacks.evaluation import RunEvaluation
from zerotrain.training.metrics.metric import OF_VALIDATION, metrics_in

LOSS_NAME = "loss.json"


def run(
    config: Config,
    folder: Path,
    *,
    weights: str,
    step: int,
    averaged: bool,
    enter: Callable[[str], None] = lambda phase: None,
    tell: Tell = tell_log,
) -> dict[str, Any]:
    """The validation loss and metrics as a run of this config computes them, on the ranks that the environment names.

    Args:
        config: its values checked; the engine is at its first stage.
        folder: rank 0 writes what is returned to `LOSS_NAME` in it.
        weights: a checkpoint, or a folder of weights that `engine.load_weights` takes.
        step: steps done, for messages.
        averaged: take the averages of the weights in a checkpoint.
        enter: called with the name of each phase as it begins.
        tell: see `World.from_environment`.

    Returns:
        `metrics`, those of `RunEvaluation.after`.

    Raises:
        ConfigError: the config does not make a run, or the weights are not what was written, or do not fit.
        CommError: another rank is gone.
    """
    with nothing_imported_from(weights), factory.joined_ranks(config, enter, tell) as world:
        torch.manual_seed(config.seed)  # for buffers that the model draws and no checkpoint has
        engine = factory.build_engine_of(config, world)
        enter(f"loading {weights}")
        try:
            engine.load_weights(weights, averaged=averaged)
        except CheckpointError as error:
            raise ConfigError(*str(error).splitlines()) from error
        enter(f"evaluating {config.model.get('_target_')}")
        evaluation = RunEvaluation(
            Console(stderr=True, quiet=world.rank > 0),
            num_batches=config.train.eval_batches,
            engine=engine,
            world=world,
            dataset=factory.build_data(config).validation,
            validation_sets=factory.build_validation_sets(config),
            micro_batch_size=config.train.micro_batch_size,
            seed=config.seed,
            collate=factory.build_collate(config),
            loss_over=config.train.loss_over,
            metrics=metrics_in(factory.build_callbacks(config), OF_VALIDATION),
        )
        result = {"metrics": evaluation.metrics_after(step)}
    if world.rank == 0:
        (folder / LOSS_NAME).write_text(json.dumps(result))
    return result
