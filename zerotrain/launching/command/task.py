"""The function that Hydra calls for each job: check the config, run the ranks, return the objective."""

import math
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zerotrain.comm.ranks.environment import RankEnvironment, num_restarts
from zerotrain.comm.ranks.world import num_gpus_for
from zerotrain.config.checks import CALLBACKS, OPEN_GROUPS, checked_config, doubtful, without_effect
from zerotrain.config.compose import first_line
from zerotrain.config.places import with_place
from zerotrain.config.schema import Config
from zerotrain.device.kinds import num_gpus
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.printable import printable
from zerotrain.files.regular import only_regular
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching.command import sweep
from zerotrain.launching.command.planned import planned, require_alone
from zerotrain.launching.end import exits
from zerotrain.launching.end.failures import RunError, name_full_disk
from zerotrain.launching.job import earlier, resuming
from zerotrain.launching.job.folder_lock import locked, note_kept
from zerotrain.launching.job.job import Job, write_ending, write_refusal
from zerotrain.launching.job.restarts import Attempts, going_on, place_of_restart
from zerotrain.launching.start.fork_server import open_fork_server
from zerotrain.launching.start.spawn import run_ranks
from zerotrain.launching.start.torchrun import job_exchange, run_here
from zerotrain.run.preflight import check as preflight
from zerotrain.run.preflight.length import length_given
from zerotrain.run.preflight.room import Ranks, file_problems, in_memory, is_on_host
from zerotrain.training.callbacks.stages import stage_at, stages_named
from zerotrain.training.figures.result import RESULT_NAME, read_result

MAX_TRACEBACK = 20_000
"""Characters."""


def run_job(composed: DictConfig) -> float:
    """Run one job, alone or of a sweep. It prints errors to stderr when they happen.

    Returns:
        The final validation loss in nats; nan where it is not a number.

    Raises:
        SystemExit: the job, alone, has failed; or a signal has ended it, and with it the sweep.
        ZeroTrainError: the job, of a sweep, has failed: the launcher marks it so and goes on.
        KeyboardInterrupt: Ctrl-C, in a sweep or at once.
    """
    open_fork_server()
    hydra = HydraConfig.get()
    is_sweep = hydra.mode == RunMode.MULTIRUN
    run_dir = _run_dir()
    try:
        if is_sweep:
            sweep.claim(run_dir, hydra.job.num)
        with locked(run_dir):
            result, signum = _run(composed, run_dir, overrides=_given(hydra))
    except Exception as error:
        is_full = name_full_disk(error, run_dir)
        said = printable(f"{type(error).__name__}: {error}")
        failure = error if isinstance(error, ZeroTrainError) else RunError(said)
        # Of a user's class that was tried out, the user needs to see where; not of what the machine has too little of.
        if failure is not error and not is_full and not isinstance(error, OSError | dist.DistError):
            print(printable(traceback.format_exc(), MAX_TRACEBACK), file=sys.stderr)
        print(f"job {hydra.job.num}: {failure}" if is_sweep else failure, file=sys.stderr)
        if is_sweep:
            raise failure from error
        raise SystemExit(exits.CONFIG_PROBLEM if isinstance(failure, ConfigError) else exits.FAILED) from error
    if result["stopped_by"] is not None:
        signum = signum or getattr(signal.Signals, result["stopped_by"], 0)  # by control.yaml is by no signal
    if result["stopped_by"] is not None or not is_sweep:
        print_ending(result, run_dir, Path.cwd(), RankEnvironment.read())
    if is_sweep and signum == signal.SIGINT:
        raise KeyboardInterrupt
    if result["stopped_by"] is not None or (is_sweep and signum):
        is_ctrl_c = signum == signal.SIGINT and RankEnvironment.read() is None  # to torchrun a code is a failure
        raise SystemExit(exits.of_signal(signum) if is_ctrl_c else exits.COMPLETED)
    loss = result["final_val_loss"]
    return math.nan if loss is None else loss


def _run_dir() -> Path:
    try:
        return Path(HydraConfig.get().runtime.output_dir)
    except OmegaConfBaseException as error:  # Hydra has resolved the name, made the folder, and resolves the name again
        print(f"hydra.run.dir: {first_line(error)}; a folder's name cannot hold `${{`", file=sys.stderr)
        raise SystemExit(exits.CONFIG_PROBLEM) from error


def _given(hydra: Any) -> list[str]:
    """The settings given on the command line, as they were: a ${...} in them is not theirs to resolve."""
    given: list[str] = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # type: ignore[assignment]
    return given


def _run(composed: DictConfig, run_dir: Path, overrides: list[str]) -> tuple[dict[str, Any], int]:
    """The body of result.json, and the signal to stop that has come to this process; 0 for none."""
    ranks = RankEnvironment.read()
    restarts = 0 if ranks is None else num_restarts()
    try:
        with exits.exits_raised():
            config, problems = _settings(composed, run_dir, ranks)
            if config.plan.only and not problems:
                require_alone()
            kept = None if problems or restarts or config.plan.only else earlier.completed_already(config, run_dir)
            data_checked, resume_from = (None, []) if kept else _checked(config, problems, run_dir, ranks)
        if ranks is not None:
            job_exchange(ranks).require_same_commands(config.launch.timeout_s)
    except Exception as error:
        with suppress(OSError):  # the cause matters more than a disk that is full
            write_refusal(run_dir, overrides, str(error))
        raise
    if config.plan.only:
        for warning in without_effect(config, _planned_ranks(config).num_ranks):
            print(f"warning: {warning}", file=sys.stderr)
        raise SystemExit(planned(config, _planned_ranks(config), run_dir, shown_from(Path.cwd(), run_dir)))
    if kept is not None:
        note_kept(run_dir)
        print(
            f"{shown_from(Path.cwd(), run_dir)} holds this run already, and it is completed; nothing is changed",
            flush=True,
        )
        return kept, 0
    num_ranks = num_local_ranks(config) if ranks is None else ranks.world_size
    for warning in without_effect(config, num_ranks) + doubtful(config) + in_memory(config, run_dir):
        print(f"warning: {warning}", file=sys.stderr)
    if config.checkpoint.save_at_end is None:
        config.checkpoint.save_at_end = HydraConfig.get().mode != RunMode.MULTIRUN
    if ranks is not None and config.launch.max_restarts:
        print("warning: launch.max_restarts has no effect under torchrun; give it --max-restarts", file=sys.stderr)
    job = Job(
        config=config,
        run_dir=run_dir,
        overrides=overrides,
        data_checked=data_checked,
        resume_from=resume_from,
        restarts=restarts,
    )
    if restarts:
        job = going_on(job)
        print(f"restart {restarts} from {place_of_restart(run_dir)}", file=sys.stderr)
    stages, step = resuming.stages_to_come(config, [Path(each) for each in job.resume_from])
    job = replace(job, stage=stage_at(stages, step))
    job.open_folder()
    _save_composition(composed, run_dir / ".hydra")
    shown = shown_from(Path.cwd(), run_dir)
    print(f"{stages_named(stages, step)}, ranks: {num_ranks}, run folder: {shown}", flush=True)
    if ranks is None:
        return _run_spawned(job, num_ranks)
    job_exchange(ranks).publish(job)
    try:
        job_exchange(ranks).prepare_data(job)
    except ZeroTrainError as error:
        write_ending(job, num_ranks, status="failed", error=str(error))
        raise
    return run_here(job, ranks), 0


def shown_from(here: Path, path: Path) -> Path:
    """A path as one who works in `here` would write it."""
    return path.relative_to(here) if path.is_relative_to(here) else path


def print_ending(result: dict[str, Any], run_dir: Path, here: Path, ranks: RankEnvironment | None) -> None:
    """Say where a run lies that has completed or was stopped in order, and how to go on with it."""
    shown, has_any = shown_from(here, run_dir), result["checkpoint"] is not None
    files = f"result.json, metrics.jsonl, ranks/{', checkpoints/' if has_any else ''}"
    print(f"{result['error'] or 'completed'}; in {shown}: {files}")
    if has_any:
        more = [f"train.max_steps={2 * result['steps']}"] if result["status"] == "completed" else []
        print(f"to go on: {resuming.command_to_go_on(result['overrides'], shown, ranks, *more)}", flush=True)
    else:
        print(
            "next: checkpoint.save_at_end=true lets a run train longer later; --cfg job shows every setting",
            flush=True,
        )


def _save_composition(composed: DictConfig, folder: Path) -> None:
    """Write what Hydra would have written before it called us, when the folder might still be another run's."""
    folder.mkdir(exist_ok=True)
    whole = {"config": composed, "hydra": HydraConfig.instance().cfg, "overrides": HydraConfig.get().overrides.task}
    for name, values in whole.items():
        with open(folder / f"{name}.yaml", "w", encoding="utf-8", opener=only_regular) as file:
            OmegaConf.save(values, file)


def _run_spawned(job: Job, num_ranks: int) -> tuple[dict[str, Any], int]:
    attempts = Attempts(job)
    try:
        signum = run_ranks(attempts, num_ranks)
    except Exception as error:
        said = str(error) if isinstance(error, ZeroTrainError) else printable(f"{type(error).__name__}: {error}")
        with suppress(OSError):  # the cause matters more than a disk that is full
            write_ending(attempts.job, num_ranks, status="failed", error=said)
        raise
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):
            write_ending(attempts.job, num_ranks, status="stopped", error="stopped by a signal")
        raise
    try:
        return read_result(job.run_dir / RESULT_NAME), signum
    except UntrustedFileError as error:
        raise RunError(f"{job.run_dir / RESULT_NAME}: {error}") from error


def _settings(composed: DictConfig, run_dir: Path, ranks: RankEnvironment | None) -> tuple[Config, list[str]]:
    """The config, and a line for each of its values that cannot be, and for what lies in the run's folder."""
    config, problems = checked_config(composed)
    problems = [_placed(problem) for problem in problems]
    num_local = num_local_ranks(config) if ranks is None else ranks.local_world_size
    device, why = device_for(config.launch.device, num_local, num_gpus_for(num_local))
    if why:
        print(f"warning: {why}", file=sys.stderr)
        config.launch.device = device
    wanted = config.launch.nproc_per_node
    if ranks is not None and wanted not in (None, ranks.local_world_size):
        started = ranks.local_world_size
        problems.append(f"launch.nproc_per_node: got {wanted}; torchrun has started {started}; leave it out")
    if not problems and is_on_host(config):  # a number of ranks that cannot be has no files to count
        problems += file_problems(num_local if ranks is None else ranks.world_size)
    return config, problems + _folder_problems(config, run_dir, ranks)


def _folder_problems(config: Config, run_dir: Path, ranks: RankEnvironment | None) -> list[str]:
    if config.plan.only or (ranks is not None and num_restarts()):
        return []
    return earlier.folder_problems(config, run_dir, of_sweep=HydraConfig.get().mode == RunMode.MULTIRUN)


def _checked(
    config: Config, problems: list[str], run_dir: Path, ranks: RankEnvironment | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The data as it was after all that can be checked without ranks, and the checkpoints to go on from. A ConfigError
    with all problems, these and others."""
    data_checked, to_try, manifest, has_length = None, [], None, config.train.max_steps is not None
    num_local = num_local_ranks(config) if ranks is None else ranks.local_world_size
    num_ranks = num_local if ranks is None else ranks.world_size
    if config.plan.only:
        require_alone()
        planned_ranks = _planned_ranks(config)
        num_ranks, num_local = planned_ranks.num_ranks, planned_ranks.num_local
    try:
        resuming.require_weights(config)
        to_try = resuming.checkpoints_to_try(config, run_dir)
        if (manifest := resuming.first_readable(to_try)) is not None:
            for line in resuming.take_from(manifest, config, num_ranks, num_local):
                print(line, flush=True)
        elif config.checkpoint.resume == earlier.AUTO:
            print(f"checkpoint.resume=auto: no checkpoint in {run_dir} yet, so the run begins at step 0", flush=True)
    except ConfigError as error:
        problems += error.problems
    # Objects are made from arguments that the signatures allow, or the same problem would be told twice.
    if not any(problem.lstrip("+").startswith((*OPEN_GROUPS, CALLBACKS, "launch")) for problem in problems):
        try:
            data_checked = preflight.check(config, num_local, num_ranks, manifest, run_dir)
        except ConfigError as error:
            problems += error.problems
    if not has_length and not problems:
        print(f"train.max_steps={config.train.max_steps}, from {length_given(config)}", flush=True)
        problems += _folder_problems(config, run_dir, ranks)  # as only now the run's last step is known
    if problems:
        raise ConfigError(*problems)
    return data_checked, [str(path) for path in to_try]


def device_for(wanted: str, num_local_ranks: int, num_gpus: int) -> tuple[str, str | None]:
    """The device of the ranks, and a line to print if `auto` falls back to the CPU.

    Each rank needs a GPU of its own. With too few, auto is the CPU: users start two ranks on a machine with one GPU to
    see how ranks work together. A device asked for by name is kept, and refused later.

    Args:
        wanted: cpu, cuda or auto.
    """
    if wanted != "auto" or not 0 < num_gpus < num_local_ranks:
        return wanted, None
    number = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return "cpu", (
        f"launch.device=auto: {num_local_ranks} ranks need a GPU each and this machine has {number}, so they run on "
        f"the CPU; launch.nproc_per_node={num_gpus} uses the GPU"
    )


def _placed(problem: str) -> str:
    hydra = HydraConfig.get()
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    chosen = {group: choice for group, choice in hydra.runtime.choices.items() if not group.startswith("hydra/")}
    return with_place(problem, dict(reversed(chosen.items())), folders, _given(hydra))


def _planned_ranks(config: Config) -> Ranks:
    num_local = num_local_ranks(config)
    num_ranks = config.plan.num_ranks or num_local
    return Ranks(num_ranks, min(num_local, num_ranks))


def num_local_ranks(config: Config) -> int:
    """Ranks to start on this machine: as set, else one for each GPU, else one."""
    return config.launch.nproc_per_node or max(1, 0 if config.launch.device == "cpu" else num_gpus())
