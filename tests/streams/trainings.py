"""Small trainings for stand-ins: an engine of a few layers on each rank, whose buckets hold a few parameters each."""

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.unit.checkpoint.slow_disk import SlowDisk
from zerotrain.comm.world import World

_DRAWING = threading.Lock()
"""Threads share the generator of random numbers."""
WIDTH, NUM_BLOCKS, NUM_ROWS = 64, 6, 16
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.scale


class Net(nn.Module):
    """Blocks of equal width; returns the loss.

    Args:
        recomputes: each block's forward in the backward.
        cuts: the graph in the middle; the half before it is kept in `cut`.
    """

    cut: torch.Tensor | None = None

    def __init__(
        self, width: int = WIDTH, num_blocks: int = NUM_BLOCKS, *, recomputes: bool = False, cuts: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.recomputes, self.cuts = recomputes, cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self.cuts and 2 * index == len(self.blocks):
                self.cut, x = x, x.detach()
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x.square().mean()


def net(width: int = WIDTH, num_blocks: int = NUM_BLOCKS, **given: bool) -> Net:
    with _DRAWING:
        torch.manual_seed(0)
        return Net(width, num_blocks, **given)


def build(
    world: World,
    stage: int,
    model: Net | None = None,
    *,
    bucket_mb: float = 0.02,
    reduction: str = "auto",
    sharding: Mapping[str, Any] | None = None,
    **given: Any,
) -> zerotrain.ZeroEngine:
    """By default a bucket for each block."""
    given = {"max_grad_norm": 0.1, "precision": "bf16", "optimizer": ADAMW} | given
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=bucket_mb, reduction=reduction, **(sharding or {}))
    return zerotrain.build_engine(model or net(), zero=zero, world=world, **given)


def rows(step: int, index: int, rank: int, width: int = WIDTH, num_rows: int = NUM_ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(num_rows, width, generator=generator)


def train(
    engine: zerotrain.ZeroEngine,
    num_steps: int = 2,
    num_micro_batches: int = 2,
    num_rows: int = NUM_ROWS,
    between: Callable[[int], None] = lambda step: None,
) -> torch.Tensor:
    """The weights after some steps, as (n,)."""
    width = engine.module.blocks[0].scale.numel()
    for step in range(num_steps):
        for number in engine.each_virtual_rank():
            for index in range(num_micro_batches):
                batch = rows(step, index, number, width, num_rows)
                if index < num_micro_batches - 1:
                    with engine.no_sync():
                        engine.backward(engine(batch))
                else:
                    engine.backward(engine(batch))
        engine.step()
        between(step)
    return torch.cat([value.flatten() for value in engine.full_state_dict().values()] or [torch.zeros(0)])


def saved_beside(engine: zerotrain.ZeroEngine, folder: Path, disk: SlowDisk) -> torch.Tensor:
    """The same, with a save under way from the first step on; nothing is written before the second has ended."""
    saves: list[Any] = []

    def between(step: int) -> None:
        if step == 0:
            saves.append(engine.begin_save(folder / "saved", staging_nbytes=2**30))
        else:
            disk.let_go(engine.world.rank)

    weights = train(engine, between=between)
    saves[0].wait()
    return weights
