"""The engines that are compared: one row each, and one file for each library."""

from dataclasses import dataclass, field, replace
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
    """The Python package it needs beside torch; looked for, not imported, since its import may be slow and loud."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    compiles: bool = True
    """Whether torch.compile works with it."""
    options: dict[str, Any] = field(default_factory=dict)
    num_eager_steps: int | None = None
    """Steps before one is recorded as a CUDA graph; None: none is."""
    whole_step: bool = True
    """Whether the graph has the optimizer's step too."""
    is_for_hosts: bool = False
    """Whether it is another way only on several hosts; "all" leaves it out."""

    @property
    def has_graph(self) -> bool:
        """Whether its steps are replayed as CUDA graphs: by the library itself, or by the benchmark."""
        return self.num_eager_steps is not None or "graphs" in self.options

    def load(self) -> None:
        """Import the library, so that its own memory and time are not counted as the engine's."""
        import_module(self.module)

    def obstacle(self, precision: str, *, compiled: bool) -> str | None:
        """Why it cannot be run so on this machine; None where it can."""
        if precision not in self.precisions:
            return f"runs in {', '.join(self.precisions)} only, not in {precision}"
        if compiled and not self.compiles:
            return "does not work with --compile"
        missing = self._missing_package()
        return missing and f"needs the package {missing}, which is not installed (pip install -e '.[bench]')"

    def _missing_package(self) -> str | None:
        if self.package is not None:
            return self.package if find_spec(self.package) is None else None
        try:
            self.load()
        except ModuleNotFoundError as error:
            return error.name
        return None

    def build(self, model: nn.Module, workload: Workload) -> Engine:
        """Hand the model (fp32, on its device, alike on every rank) to the engine."""
        engine: Any = import_module(self.module).build(model, workload, **self.options)
        if self.num_eager_steps is None:
            built: Engine = engine
            return built
        # Imported here: it imports this module.
        from benchmarks.engines.graph import GraphedTraining

        return GraphedTraining(engine, whole_step=self.whole_step, num_eager_steps=self.num_eager_steps)


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
    "fsdp2_mesh": EngineSpec(
        "FSDP2, resharded, hosts x ranks",
        "benchmarks.engines.fsdp2",
        3,
        options={"reshard": True, "by_host": True},
        is_for_hosts=True,
    ),
}
ENGINES |= {
    f"zero{stage}_mesh": EngineSpec(
        f"zerotrain stage {stage}, hosts x ranks",
        "benchmarks.engines.ours",
        stage,
        is_ours=True,
        options={"stage": stage, "shard_size": "host"},
        is_for_hosts=True,
    )
    for stage in (2, 3)
}
NUM_EAGER_STEPS, NUM_EAGER_STEPS_OF_DDP = 3, 11
"""DDP looks at its buckets in the first ones, say torch's notes on CUDA graphs."""
# On a CPU, which has no graphs, they are the engines above.
ENGINES |= {
    "alone_graph": replace(ENGINES["alone_bf16"], label="no communication, one graph", num_eager_steps=NUM_EAGER_STEPS),
    "ddp_graph": replace(ENGINES["ddp_bf16"], label="DDP, one graph", num_eager_steps=NUM_EAGER_STEPS_OF_DDP),
    "fsdp2_graph": replace(
        ENGINES["fsdp2"],
        label="FSDP2, graph as torchtitan's",
        num_eager_steps=NUM_EAGER_STEPS,
        whole_step=False,  # the optimizer's runs eagerly
    ),
    "zero0_graph": replace(ENGINES["zero0"], label="zerotrain stage 0, graphs", options={"stage": 0, "graphs": "auto"}),
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
    if _spec.stage is not None and not _spec.is_ours and not _spec.has_graph:
        PEERS.setdefault(_spec.stage, []).append(_name)

DDP_WAYS = ("ddp", "ddp_bf16")
"""Plain data parallel training by PyTorch, in its documented way and in the one with our dtypes."""


def choose_engines(wanted: str, precision: str, *, compiled: bool = False) -> tuple[list[str], dict[str, str]]:
    """The engines to run of a comma-separated list, in its order, and of the others the reason why they cannot be.

    "all" is each that has the precision and can be compiled, but those with a graph, which must be named.

    Raises:
        BenchmarkError: an unknown name, or none of them can be run.
    """
    names = wanted.split(",")
    if wanted == "all":
        usual = {name: spec for name, spec in ENGINES.items() if not (spec.is_for_hosts or spec.has_graph)}
        fitting = {name: spec for name, spec in usual.items() if precision in spec.precisions}
        names = [name for name, spec in fitting.items() if spec.compiles or not compiled]
    for name in names:
        if name not in ENGINES:
            raise BenchmarkError(f"--engines: unknown engine {name!r}; allowed: all, {', '.join(ENGINES)}")
    obstacles = {name: ENGINES[name].obstacle(precision, compiled=compiled) for name in names}
    left_out = {name: obstacle for name, obstacle in obstacles.items() if obstacle is not None}
    able = [name for name in names if name not in left_out]
    if not able:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items())
        raise BenchmarkError(f"--engines: none of these can be run: {reasons}")
    return able, left_out
