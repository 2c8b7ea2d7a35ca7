"""The checks of a job before any of its ranks starts: its config, its folder, its data, what it goes on from."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.comm.world import num_gpus_for
from zerotrain.config.checks import CALLBACKS, OPEN_GROUPS, checked_config
from zerotrain.config.explain import with_place
from zerotrain.config.schema import Config
from zerotrain.device.processes import one_thread
from zerotrain.errors import ConfigError
from zerotrain.launching.command.placing import all_ranks, device_for
from zerotrain.launching.end import exits
from zerotrain.launching.job import earlier, resuming
from zerotrain.launching.job.scheduled import set_code_when_stopped
from zerotrain.launching.job.started import start_problems
from zerotrain.preflight.check import check, length_given
from zerotrain.preflight.room import file_problems, is_on_host


@dataclass(frozen=True)
class ReadConfig:
    """A config as it was read, with a line for each of its values that cannot be."""

    config: Config | None
    problems: list[str]
    error: Exception | None = None
    """Why there is none."""


def read_config(composed: DictConfig) -> ReadConfig:
    try:
        with exits.exits_raised():
            return ReadConfig(*checked_config(composed))
    except Exception as error:
        return ReadConfig(None, [], error)


def given_settings(hydra: Any) -> list[str]:
    """The settings given on the command line, as they were: a ${...} in them is not theirs to resolve."""
    given: list[str] = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # type: ignore[assignment]
    return given


def settings_of(read: ReadConfig, run_dir: Path, ranks: RankEnvironment | None) -> tuple[Config, list[str]]:
    """The config, and a line for each of its values that cannot be, and for what lies in the run's folder."""
    if read.config is None:
        raise read.error or AssertionError
    config, problems = read.config, [_placed(problem) for problem in read.problems]
    set_code_when_stopped(config)
    started = all_ranks(config, ranks)
    device, why = device_for(config.launch.device, started.num_local, num_gpus_for(started.num_local))
    if why:
        print(f"warning: {why}", file=sys.stderr)
        config.launch.device = device
    wanted = config.launch.nproc_per_node
    if ranks is not None and wanted not in (None, started.num_local):
        problems.append(
            f"launch.nproc_per_node: got {wanted}; {ranks.starter} has started {started.num_local}; leave it out"
        )
    # A number of ranks that cannot be has no files to count, and a plan opens none.
    if not problems and is_on_host(config) and not config.plan.only:
        problems += file_problems(started.num_ranks)
    problems += start_problems(config.checkpoint.resume, ranks)
    return config, problems + _folder_problems(config, run_dir, ranks)


def _folder_problems(config: Config, run_dir: Path, ranks: RankEnvironment | None) -> list[str]:
    if ranks is not None and num_restarts():
        return []
    return earlier.folder_problems(config, run_dir, of_sweep=HydraConfig.get().mode == RunMode.MULTIRUN)


def require_sound(
    asked: Config, config: Config, problems: list[str], run_dir: Path, ranks: RankEnvironment | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The data as it was after all that can be checked without ranks, and the checkpoints to go on from. A ConfigError
    with all problems, these and others.

    Args:
        asked: the config with its `auto`.
        config: with values in their place; gets what the data decides.
    """
    data_checked, to_try, manifest, has_length = None, [], None, config.train.max_steps is not None
    started = all_ranks(config, ranks)
    try:
        resuming.require_weights(config)
        to_try = resuming.checkpoints_to_try(config, run_dir)
        if (manifest := resuming.first_readable(to_try)) is not None:
            for line in resuming.take_from(manifest, config, started.num_ranks, started.num_local):
                print(line, flush=True)
        elif config.checkpoint.resume == earlier.AUTO:
            print(f"checkpoint.resume=auto: no checkpoint in {run_dir} yet, so the run begins at step 0", flush=True)
    except ConfigError as error:
        problems += error.problems
    # Objects are made from arguments that the signatures allow, or the same problem would be told twice.
    if not any(problem.lstrip("+").startswith((*OPEN_GROUPS, CALLBACKS, "launch")) for problem in problems):
        settings = {problem.partition(":")[0] for problem in problems}
        try:
            with one_thread():
                data_checked = check(config, started.num_local, started.num_ranks, manifest, run_dir)
        except ConfigError as error:
            problems += [each for each in error.problems if each.partition(":")[0] not in settings]
    if not has_length and not problems:
        print(f"train.max_steps={config.train.max_steps}, from {length_given(config)}", flush=True)
        asked.train.max_steps = config.train.max_steps
        problems += _folder_problems(asked, run_dir, ranks)  # as only now the run's last step is known
    if problems:
        raise ConfigError(*problems)
    return data_checked, [str(path) for path in to_try]


def _placed(problem: str) -> str:
    hydra = HydraConfig.get()
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    chosen = {group: choice for group, choice in hydra.runtime.choices.items() if not group.startswith("hydra/")}
    return with_place(problem, dict(reversed(chosen.items())), folders, given_settings(hydra))
