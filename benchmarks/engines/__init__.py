"""The engines that are compared: one row each, and one file for each library."""

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.errors import BenchmarkError
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Traffic:
    """What an engine says it sent in its last step, in bytes of one rank."""

    counted_nbytes: int
    theory_nbytes: int


class Engine(Protocol):
    """A model under training by one library."""

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Train one optimizer step; return this rank's mean loss over the micro-batches: 0-dim, detached."""

    def traffic(self) -> Traffic | None:
        """What the last step sent, where the engine counts it."""


@dataclass(frozen=True)
class EngineSpec:
    """One row of the comparison. `module` has `build(model, workload, **options) -> Engine`."""

    label: str
    module: str
    stage: int | None = None
    """The ZeRO stage it is compared at; None for what shares nothing between ranks."""
    is_ours: bool = False
    package: str | None = None
    """The Python package it needs beside torch."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    compiles: bool = True
    """Whether torch.compile works with it."""
    options: dict[str, Any] = field(default_factory=dict)

    def load(self) -> None:
        """Import the library, so that its own memory and time are not counted as the engine's."""
        import_module(self.module)

    def build(self, model: nn.Module, workload: Workload) -> Engine:
        """Hand the model (fp32, on its device, alike on every rank) to the engine."""
        engine: Engine = import_module(self.module).build(model, workload, **self.options)
        return engine


BF16 = ("bf16",)
ENGINES = {
    "alone": EngineSpec("no communication", "benchmarks.engines.plain"),
    "alone_bf16": EngineSpec(
        "no communication, bf16 weights", "benchmarks.engines.plain", precisions=BF16, options={"bf16_weights": True}
    ),
    "zero0": EngineSpec("zerotrain stage 0", "benchmarks.engines.ours", 0, is_ours=True, options={"stage": 0}),
    "zero1": EngineSpec("zerotrain stage 1", "benchmarks.engines.ours", 1, is_ours=True, options={"stage": 1}),
    "zero2": EngineSpec("zerotrain stage 2", "benchmarks.engines.ours", 2, is_ours=True, options={"stage": 2}),
    "zero3": EngineSpec("zerotrain stage 3", "benchmarks.engines.ours", 3, is_ours=True, options={"stage": 3}),
    "ddp": EngineSpec("DDP", "benchmarks.engines.ddp", 0),
    "ddp_bf16": EngineSpec(
        "DDP, bf16 weights", "benchmarks.engines.ddp", 0, precisions=BF16, options={"bf16_weights": True}
    ),
    "ddp_zero": EngineSpec(
        "DDP + ZeroRedundancyOptimizer", "benchmarks.engines.ddp", 1, options={"sharded_optimizer": True}
    ),
    "fsdp2_kept": EngineSpec("FSDP2, not resharded", "benchmarks.engines.fsdp2", 2, options={"reshard": False}),
    "fsdp2": EngineSpec("FSDP2, resharded", "benchmarks.engines.fsdp2", 3, options={"reshard": True}),
}
ENGINES |= {
    f"deepspeed{stage}": EngineSpec(
        f"DeepSpeed stage {stage}",
        "benchmarks.engines.deepspeed_zero",
        stage,
        package="deepspeed",
        compiles=compiles,
        options={"stage": stage},
    )
    # At stage 3 DeepSpeed 0.19 lets the compiler see the weight of a tied output layer while it is sharded.
    for stage, compiles in enumerate((True, True, True, False))
}
PEERS: dict[int, list[str]] = {}
"""Engines of other libraries by ZeRO stage."""
for _name, _spec in ENGINES.items():
    if _spec.stage is not None and not _spec.is_ours:
        PEERS.setdefault(_spec.stage, []).append(_name)

DDP_WAYS = ("ddp", "ddp_bf16")
"""Plain data parallel training by PyTorch, in its documented way and in the one with our dtypes."""


def choose_engines(wanted: str, precision: str, *, compiled: bool = False) -> list[str]:
    """The names in a comma-separated list, in its order; "all" for each that can run so.

    Raises:
        BenchmarkError: an unknown name, one that has no such precision or cannot be compiled, or a package that is not
            installed.
    """
    if wanted == "all":
        fitting = {name: spec for name, spec in ENGINES.items() if precision in spec.precisions}
        names = [name for name, spec in fitting.items() if spec.compiles or not compiled]
    else:
        names = wanted.split(",")
    for name in names:
        if name not in ENGINES:
            raise BenchmarkError(f"--engines: unknown engine {name!r}; allowed: all, {', '.join(ENGINES)}")
        spec = ENGINES[name]
        if precision not in spec.precisions:
            raise BenchmarkError(f"--engines: {name} runs in {', '.join(spec.precisions)} only, not in {precision}")
        if compiled and not spec.compiles:
            raise BenchmarkError(f"--engines: {name} does not work with --compile")
        if spec.package is not None and find_spec(spec.package) is None:
            raise BenchmarkError(
                f"engine {name} needs the package {spec.package}, which is not installed: "
                "pip install -e '.[bench]', or name the engines to run with --engines"
            )
    return names
