"""`python -m benchmarks.small_parameters`: many small parameters against the same bytes in a few large ones.

The engine should work per bucket, whatever the number of parameters. Its cost is the time of a step less that of the
same model's bare forward and backward, and the Python calls of a step less those of the bare one. The other ranks are
fake, so that nothing but this rank's own work is measured.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerotrain
from benchmarks.engines.ours import current_world
from benchmarks.report import markdown
from benchmarks.rounds import machine

NUMEL = 10_000 * 256
NUM_WARMUP_STEPS = 5
FAKE_RANKS = 8


class Blocks(nn.Module):
    """`num_parameters` vectors, NUMEL elements in all, in blocks like a transformer's; forward reads each one once."""

    def __init__(self, num_parameters: int, num_blocks: int = 10) -> None:
        super().__init__()
        numel = NUMEL // num_parameters
        self.blocks = nn.ModuleList(Vectors(num_parameters // num_blocks, numel) for _ in range(num_blocks))

    def forward(self) -> torch.Tensor:
        return torch.stack([block() for block in self.blocks]).sum()


class Vectors(nn.Module):
    """Some vectors; forward is the mean square of all their elements."""

    def __init__(self, num_parameters: int, numel: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(numel) for _ in range(num_parameters))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.vectors)).square().mean()


def bare_step(model: nn.Module) -> Callable[[], Any]:
    """Forward and backward, and the gradients dropped."""

    parameters = list(model.parameters())

    def step() -> None:
        model().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def engine_step(model: nn.Module, stage: int) -> Callable[[], Any]:
    """A whole step of our engine."""
    engine = zerotrain.build_engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
        zero=zerotrain.ZeroConfig(stage=stage),
        world=current_world(torch.device("cpu")),
    )
    return lambda: engine.train_step([()])


def median_ms(step: Callable[[], Any], num_steps: int) -> float:
    """Median milliseconds of a step, the first ones left out."""
    times_ms = []
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        start_s = time.perf_counter()
        step()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times_ms[NUM_WARMUP_STEPS:])


def python_calls(step: Callable[[], Any]) -> int:
    """Calls of Python functions and of C functions from Python in one step."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num_calls


def main() -> None:
    """Print a table: a row for each stage and number of parameters."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_parameters", description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10, 100, 10_000])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_RANKS)
    rows = [["stage", "parameters", "bare ms", "engine ms", "engine's own ms", "bare calls", "engine's own calls"]]
    for stage in range(4):
        for num_parameters in options.parameters:
            bare = bare_step(Blocks(num_parameters))
            whole = engine_step(Blocks(num_parameters), stage)
            bare_ms, whole_ms = median_ms(bare, options.steps), median_ms(whole, options.steps)
            bare_calls, whole_calls = python_calls(bare), python_calls(whole)
            times = [f"{value:.2f}" for value in (bare_ms, whole_ms, whole_ms - bare_ms)]
            rows.append([str(stage), f"{num_parameters:,}", *times, f"{bare_calls:,}", f"{whole_calls - bare_calls:,}"])
    print(f"{NUMEL / 1e6:.1f} M elements, fp32, {FAKE_RANKS} fake ranks; {machine()}\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
