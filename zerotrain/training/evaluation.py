"""The validation loss."""

import math
from typing import Any

import torch
from torch.utils.data import default_collate

from zerotrain.comm.world import World
from zerotrain.data.batches import IGNORED_LABEL
from zerotrain.engine.engine import ZeroEngine


def evaluate(*, engine: ZeroEngine, world: World, dataset: Any, num_sequences: int, micro_batch_size: int) -> float:
    """Mean loss in nats over all tokens of the same validation sequences at any number of ranks. Collective.

    Args:
        engine: called as engine(ids, labels) for the mean loss of a micro-batch.
        dataset: the validation set.
        num_sequences: how many of its sequences are read, over all ranks.
        micro_batch_size: sequences of one rank's forward.

    Returns:
        nan where no label counts.

    What it draws of random numbers (a dataset that augments, a model that samples) leaves the generators of this
    process as they were: how often one evaluates must change no training.
    """
    rows = validation_rows(len(dataset), num_sequences)
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # sum of losses, number of tokens
    engine.eval()
    with torch.no_grad(), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for first in range(0, len(rows), world.size * micro_batch_size):
            start = first + world.rank * micro_batch_size
            totals += _loss_and_tokens(engine, world, dataset, rows[start : start + micro_batch_size])
    engine.train()
    loss_sum, num_tokens = world.sum(totals).tolist()
    return loss_sum / num_tokens if num_tokens else math.nan


def validation_rows(num_available: int, num_wanted: int) -> list[int]:
    """Which sequences an evaluation reads: as many as wanted, or all, evenly spread over the validation set."""
    num_rows = min(num_available, num_wanted)
    return [row * num_available // num_rows for row in range(num_rows)]


def _loss_and_tokens(engine: ZeroEngine, world: World, dataset: Any, rows: list[int]) -> torch.Tensor:
    """(sum of losses, number of tokens) of some sequences, (2,) fp64.

    A rank that has no row left runs a forward all the same and counts nothing of it: where parameters are sharded,
    the others need its part of them. Nor does a loss over no token count, whose mean is nan in many models.
    """
    ids, labels = default_collate([dataset[row] for row in rows or [0]])
    num_tokens = int((labels != IGNORED_LABEL).sum()) if rows else 0
    loss = engine(ids.to(world.device), labels.to(world.device)).double()
    if num_tokens == 0:
        return loss.new_zeros(2)
    return torch.stack([loss * num_tokens, torch.full_like(loss, num_tokens)])
