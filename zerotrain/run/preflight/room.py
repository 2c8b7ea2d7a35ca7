"""Whether there is room for what a run offloads, and for the files that its ranks open, before any rank starts."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zerotrain.comm.whereabouts import files_problem
from zerotrain.config.schema import Config
from zerotrain.device.kinds import num_gpus
from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE, OptimizerFactory, sampled_nbytes, updates_whole
from zerotrain.engine.model.precision import dtypes_of, precision_named
from zerotrain.errors import ConfigError, OffloadError
from zerotrain.offload.disk import ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import SAMPLE_NBYTES
from zerotrain.run.factory import averages_in, build_optimizer_factory
from zerotrain.sharding.plan import STAGES, Plan, Volume
from zerotrain.sharding.units import model_parameters


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run, and those on this machine."""

    num_ranks: int
    num_local: int


def require_room(config: Config, model: nn.Module | None, run_dir: Path | None, ranks: Ranks) -> None:
    """Make sure that a disk that is offloaded to can be, and has as much free as the ranks of this machine will take.
    Room for activations is unknown and not counted.

    Args:
        model: without memory; None: its size is not known, and the ranks find out.
        run_dir: the folder that a null `offload.path` stands for.

    Raises:
        ConfigError: no file can be made in the folder, or the disk is too small.
    """
    offload = config.offload
    if not offload.uses_disk or (run_dir is None and offload.path is None):
        return
    folder, there = _folders(Path(offload.path or run_dir or ""))
    try:
        ScratchFile(there, "this run")
    except OffloadError as error:
        raise ConfigError(f"{error}; name another folder") from error
    needed = 0 if model is None else _needed_nbytes(config, model, ranks)
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"offload.path: {folder} has {free / 1e9:.3g} GB free, and this run needs {needed / 1e9:.3g} GB there; "
            "name a folder on a larger disk, or offload less (offload.keep)"
        )


def plans_of(stages: Iterable[Any]) -> list[Plan]:
    """Plans of those stages that exist: other stages are reported elsewhere."""
    given = list(stages)
    return [plan for stage, plan in enumerate(STAGES) if stage in given]


def is_on_host(config: Config) -> bool:
    """Whether the ranks of this machine compute on the CPU."""
    return config.launch.device == "cpu" or not num_gpus()


def file_problems(num_ranks: int) -> list[str]:
    """A line where a rank on the CPU may open fewer files than it needs to meet the others; none otherwise.

    With 20 files two ranks waited for each other until `launch.timeout_s` was over (2026-11-23): the kernel drops
    a file that another rank sends to a process that may open no more. With 12, gloo's own thread aborted the process.
    """
    problem = files_problem(num_ranks)
    return [f"launch: {problem}"] if problem else []


def in_memory(config: Config, run_dir: Path) -> list[str]:
    """A line where what is offloaded stays in the memory that it comes from; none otherwise."""
    if config.offload.activations == "cpu" and is_on_host(config):
        return [
            "offload.activations=cpu: a run on the CPU has its activations in host memory already, so that this adds "
            "copies; leave it out, or give disk"
        ]
    folder, there = _folders(Path(config.offload.path or run_dir))
    if "disk" not in (config.offload.optimizer, config.offload.parameters) or not lies_in_memory(there):
        return []
    return [
        f"offload.path: {folder} is in memory ({file_system_of(there)}), so that offloading to it frees none; "
        "name a folder on a disk"
    ]


def _folders(given: Path) -> tuple[Path, Path]:
    """It, and the first of it and those around it that is there."""
    folder = given.absolute()
    return folder, next(each for each in (folder, *folder.parents) if os.path.lexists(each))


def _needed_nbytes(config: Config, model: nn.Module, ranks: Ranks) -> int:
    """Bytes of all ranks of this machine at the stage that takes most, with those that they measure its rates by."""
    volume, optimizer_nbytes = model_sizes(config, model, build_optimizer_factory(config), ranks)
    needed = 0.0
    for plan in plans_of(config.zero.stages.values()):
        held, placed = volume.memory_nbytes(plan, optimizer_nbytes), 0.0
        if config.offload.optimizer == "disk":
            placed += ranks.num_local * held["optimizer"] * (1 - config.offload.keep)
        if config.offload.parameters == "disk" and plan.shards_parameters:
            placed += ranks.num_local * held["parameters"]
        needed = max(needed, placed)
    sample = min(needed, ranks.num_local * SAMPLE_NBYTES)
    return round(needed + sample)


def model_sizes(config: Config, model: nn.Module, factory: OptimizerFactory, ranks: Ranks) -> tuple[Volume, int]:
    """Bytes of weights and gradients; and of the optimizer's state, with master weights that are copies and the
    average of weights: 0 of a state that cannot be tried here, as it needs a GPU."""
    precision = precision_named(config.precision.name, tuple(config.precision.keep_fp32))
    held = dtypes_of(model_parameters(model), precision)
    trained = {each: dtype for each, dtype in held.items() if each.requires_grad}
    trainable, frozen = (
        sum(each.numel() * dtype.itemsize for each, dtype in held.items() if each.requires_grad is trains)
        for trains in (True, False)
    )
    per_element = 0.0
    with suppress(Exception):
        sampled = [sampled_nbytes(factory, is_whole=True)] if updates_whole(factory) else []
        if hasattr(factory, "needs_whole") or not sampled:
            sampled.append(sampled_nbytes(factory, is_whole=False))
        per_element = min(sampled) / (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    copies = sum(each.numel() for each, dtype in trained.items() if dtype != precision.master)
    if averages_in(config):
        copies += sum(each.numel() for each in trained)
    state = per_element * sum(each.numel() for each in trained) + copies * precision.master.itemsize
    return Volume(trainable, frozen, ranks.num_ranks), round(state)
