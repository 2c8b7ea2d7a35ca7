"""Finds the checkpoints from which a run tries to resume, and the settings that they decide."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, candidates, first_whole, newest_first
from zerotrain.checkpoint.manifest import Manifest, read_manifest
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.compose import slurm_job
from zerotrain.config.schema import LENGTHS, Config
from zerotrain.config.words import quoted
from zerotrain.device.kinds import num_gpus
from zerotrain.engine.options import leaves_per_rank
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.launching.job.earlier import AUTO
from zerotrain.launching.job.job import num_threads_per_rank
from zerotrain.launching.job.started import elastic_hosts, torchrun_options
from zerotrain.training.callbacks.stages import stages_from

MAX_THREADS = 10_000
_CONFIG_OPTIONS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_OF_RESUMING = ("hydra.run.dir=", "checkpoint.resume=", "launch.overwrite=")


def require_weights(config: Config) -> None:
    """Look whether there are weights where the run is to take its first ones from.

    Raises:
        ConfigError: there are none that can be read.
    """
    path = config.checkpoint.init_from
    try:
        if path is not None:
            find_weights(path).close()
    except CheckpointError as error:
        raise ConfigError(*(f"checkpoint.init_from: got {path}; {line}" for line in str(error).splitlines())) from error


def checkpoints_to_try(config: Config, run_dir: Path) -> list[Path]:
    """The checkpoints to go on from, the best first; none to begin anew.

    Raises:
        ConfigError: the one that was asked for is not there.
    """
    resume = config.checkpoint.resume
    if resume is None:
        return []
    if resume == AUTO:
        return newest_first(run_dir / CHECKPOINTS)
    try:
        return candidates(Path(resume).absolute())
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: got {resume}; {error}") from error


def first_readable(paths: Sequence[Path]) -> Manifest | None:
    """The manifest of the first that has one that is whole. The ranks verify the rest.

    Raises:
        ConfigError: there are some, and none is.
    """
    found, problems = first_whole(paths, read_manifest)
    if found is None and problems:
        raise ConfigError(*(f"checkpoint.resume: {problem}" for problem in problems))
    return None if found is None else found[1]


def stages_to_come(config: Config, paths: Sequence[Path]) -> tuple[dict[int, int], int]:
    """Steps done and the stage from there on, of a run that goes on from the first of these checkpoints that can be
    read, and the step it goes on at. The ranks may find that one damaged, and take an older one."""
    found, _ = first_whole(paths, read_manifest)
    return stages_from(None if found is None else found[1], config.zero.stages)


def take_from(manifest: Manifest, config: Config, num_ranks: int, num_local_ranks: int) -> list[str]:
    """Let `train.virtual_ranks=null` and, for training on the CPU, `launch.threads_per_rank=null` be what the
    checkpoint was trained with: so it is the same run on any number of ranks. Lines that say so, or why not.

    Args:
        num_local_ranks: of this machine.

    Raises:
        ConfigError: the checkpoint is further than the run is to go.
    """
    if config.train.max_steps is not None and manifest.step > config.train.max_steps:
        raise ConfigError(
            f"train.max_steps: got {config.train.max_steps}; it must be {manifest.step} or more, the step of the "
            "checkpoint that the run resumes from"
        )
    lines = []
    wanted = int(manifest.content["virtual_ranks"])
    if config.train.virtual_ranks is None and wanted != num_ranks:
        try:
            leaves_per_rank(wanted, num_ranks, config.zero.accumulate)
            config.train.virtual_ranks = wanted
            lines.append(f"train.virtual_ranks={wanted}, as in the checkpoint")
        except ConfigError:
            lines.append(
                f"warning: the checkpoint was trained with {wanted} virtual ranks, which {num_ranks} ranks cannot "
                "share evenly: the batch size changes from here on"
            )
    saved: Any = manifest.content["config"]
    for name in ("launch", "threads_per_rank"):
        saved = saved.get(name) if isinstance(saved, dict) else None
    is_on_cpu = config.launch.device == "cpu" or not num_gpus()
    if is_on_cpu and config.launch.threads_per_rank is None and type(saved) is int and 0 < saved <= MAX_THREADS:
        own = num_threads_per_rank(config, num_local_ranks)
        if saved != own:
            config.launch.threads_per_rank = saved
            lines.append(f"launch.threads_per_rank={saved}, as in the checkpoint; {own} may be faster, with other bits")
    return lines


def command_to_go_on(overrides: list[str], run_dir: Path, ranks: RankEnvironment | None, *more: str) -> str:
    """The command that goes on with a run, for a shell. In a job of sbatch that was stopped it is one for Slurm, which
    alone knows the job's script.

    Args:
        overrides: the run's own.
        run_dir: as it is to be written.
        ranks: of torchrun or srun, where that has started them; None: they were started by us.
        more: settings that are to be others.
    """
    job = slurm_job(os.environ) if os.environ.get("ENVIRONMENT") == "BATCH" else None  # as sbatch sets it
    if job is not None and not more:
        settings = with_run_dir([f"checkpoint.resume={AUTO}"], run_dir)
        return f"scontrol requeue {job}; when Slurm has forgotten the job, its script with {shlex.join(settings)}"
    program, _, of_module = sys.argv[0].rpartition("python ")
    started = shlex.split(of_module) if program == "" and of_module.startswith("-m ") else [sys.argv[0]]
    starter = "python"
    if ranks is not None:
        is_one_machine = ranks.local_world_size == ranks.world_size
        number = {"torchrun": "--nproc-per-node", "srun": "--ntasks"}[ranks.starter]
        options = torchrun_options(ranks)
        if options is not None and (elastic_hosts(options) or not is_one_machine):
            starter = f"torchrun {shlex.join(options)}"
        else:
            starter = f"{ranks.starter} {f'{number} {ranks.world_size}' if is_one_machine else '...'}"
        starter += " python" if ranks.starter == "srun" else ""
    replaced = (*_OF_RESUMING, *(f"{each.partition('=')[0]}=" for each in more))
    if any(each.startswith("train.max_steps=") for each in more):
        replaced += tuple(f"train.{name}=" for name in LENGTHS)  # a run has one length
    kept = [each for each in overrides if not each.lstrip("+").startswith(replaced)]
    settings = with_run_dir([*kept, *more, f"checkpoint.resume={AUTO}"], run_dir)
    return f"{starter} {shlex.join([*started, *settings, *_config_options(sys.argv[1:])])}"


def with_run_dir(arguments: list[str], run_dir: Path) -> list[str]:
    """The same command line for a job in this folder, whatever its name."""
    text = str(run_dir)
    if not re.fullmatch(r"[\w./-]+", text, re.ASCII):
        text = quoted(text)
    others = [argument for argument in arguments if not argument.startswith("hydra.run.dir=")]
    return [f"hydra.run.dir={text}", *others]


def _config_options(arguments: list[str]) -> list[str]:
    """The options of a command line that name folders or files of configs."""
    found = []
    for place, argument in enumerate(arguments):
        name, has_value, _ = argument.partition("=")
        if name in _CONFIG_OPTIONS:
            found += [argument] if has_value else arguments[place : place + 2]
    return found
