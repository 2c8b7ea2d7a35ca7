"""zerotrain's own engine."""

import os
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.engines import Traffic
from benchmarks.workload import LEARNING_RATE, Workload
from zerotrain import World, ZeroConfig, ZeroEngine, build_engine
from zerotrain.comm.world import Shards


class ZerotrainTraining:
    """One ZeroEngine."""

    def __init__(self, engine: ZeroEngine, num_micro_batches: int) -> None:
        self.engine = engine
        self.num_micro_batches = num_micro_batches

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """See `Engine.step`."""
        return self.engine.train_step(micro_batches).loss

    def traffic(self) -> Traffic | None:
        """See `Engine.traffic`."""
        return Traffic(
            counted_nbytes=self.engine.ledger.last_step.sent_nbytes,
            theory_nbytes=self.engine.theoretical_sent_nbytes(self.num_micro_batches),
        )


def current_world(device: torch.device) -> World:
    """The world of the process group there is."""
    if dist.get_backend() != "fake":
        return World.current(device)
    # Which on the CPU `World.current` refuses, and rightly so.
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        device=device,
        shards=Shards(rank, size, dist.group.WORLD, dist.new_group()),
        group=dist.group.WORLD,
    )


def build(
    model: nn.Module, workload: Workload, *, stage: int, graphs: str = "off", shard_size: str | None = None
) -> ZerotrainTraining:
    """Train by our engine at a ZeRO stage; weight decay on every parameter, as AdamW does by itself.

    Args:
        graphs: "auto" replays steps as CUDA graphs. On a GPU a step without is an error then, with the reason.
    """
    if graphs == "auto" and workload.device == "cuda":
        warnings.filterwarnings("error", message=".*steps are computed without graphs", category=RuntimeWarning)
    engine = build_engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        zero=ZeroConfig(stage=stage, bucket_mb=workload.bucket_mb, shard_size=shard_size),
        precision=workload.precision,
        # What fake ranks gather may be no numbers: with torch 2.11 stage 3 in bf16 ended so, after 20 steps in a row.
        max_skipped_steps=1_000_000 if dist.get_backend() == "fake" else 20,
        decay_all=True,
        max_grad_norm=workload.max_grad_norm,
        compile=workload.compiled,
        graphs=graphs,
        world=current_world(next(model.parameters()).device),
    )
    return ZerotrainTraining(engine, workload.num_micro_batches)
