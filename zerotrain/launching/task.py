"""The function for Hydra to call for each job: check the config, run the ranks, return the objective."""

import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from rich.console import Console

from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.comm.world import choose_device, num_gpus_for
from zerotrain.config import checks, explain
from zerotrain.config.schema import Config
from zerotrain.device.kinds import num_gpus
from zerotrain.device.processes import compute_in_child, one_thread
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.terminal import code_of, printed_to
from zerotrain.files.untrusted import UntrustedFileError, only_regular, printable
from zerotrain.launching import exits, resuming
from zerotrain.launching.failures import RunError, name_full_disk
from zerotrain.launching.job import Job, locked, write_ending, write_refusal
from zerotrain.launching.spawn import open_fork_server, run_ranks
from zerotrain.launching.sweep.telling import join_sweep
from zerotrain.preflight import choice, room
from zerotrain.preflight.check import check, length_given
from zerotrain.preflight.plan import PLAN_NAME, Memory, Planner, print_plan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.report.journal import JournalError
from zerotrain.settings import autos_of
from zerotrain.training import request
from zerotrain.training.callbacks.stages import stage_at, stages_named
from zerotrain.training.result import RESULT_NAME, RunResult, code_of_stop

# The ranks of a command, and the device they compute on.


def device_for(device: str, num_local_ranks: int, num_gpus: int) -> tuple[str, str | None]:
    """The device of the ranks, and a line to print if `auto` falls back to the CPU.

    Each rank needs a GPU of its own. With too few, auto is the CPU: users start two ranks on a machine with one GPU to
    see how ranks work together. A device asked for by name is kept, and refused later.

    Args:
        device: cpu, cuda or auto.
    """
    if device != "auto" or not 0 < num_gpus < num_local_ranks:
        return device, None
    number = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return "cpu", (
        f"launch.device=auto: {num_local_ranks} ranks need a GPU each and this machine has {number}, so they run on "
        f"the CPU; launch.nproc_per_node={num_gpus} uses the GPU"
    )


def all_ranks(config: Config, ranks: RankEnvironment | None) -> room.Ranks:
    """The ranks started by torchrun, else the ranks to plan for or to start."""
    if ranks is not None:
        return room.Ranks(ranks.world_size, ranks.local_world_size)
    num_local = num_local_ranks(config)
    num_ranks = (config.plan.only and config.plan.num_ranks) or num_local
    if config.plan.only and config.plan.num_hosts:
        num_local = -(-num_ranks // config.plan.num_hosts)
    return room.Ranks(num_ranks, min(num_local, num_ranks))


def num_local_ranks(config: Config) -> int:
    """Ranks to start on this machine: as set, else one for each GPU, else one."""
    return config.launch.nproc_per_node or max(1, 0 if config.launch.device == "cpu" else num_gpus())


def started_ranks(config: Config, ranks: RankEnvironment | None) -> tuple[room.Ranks, list[str]]:
    """The ranks of a command, whose device the config gets; and a line where torchrun has started another number than
    the config asks for."""
    started, nproc = all_ranks(config, ranks), config.launch.nproc_per_node
    device, why = device_for(config.launch.device, started.num_local, num_gpus_for(started.num_local))
    if why:
        print(f"warning: {why}", file=sys.stderr)
        config.launch.device = device
    if ranks is None or nproc in (None, started.num_local):
        return started, []
    problem = f"launch.nproc_per_node: got {nproc}; {ranks.starter} has started {started.num_local}; leave it out"
    return started, [problem]


# The checks of a job before any of its ranks starts: its config, its folder, its data, what it goes on from.


@dataclass(frozen=True)
class ReadConfig:
    """A config as it was read, with a line for each impossible value."""

    config: Config | None
    problems: list[str]
    error: Exception | None = None
    """Why there is none."""


def read_config(composed: DictConfig) -> ReadConfig:
    try:
        with exits.exits_raised():
            return ReadConfig(*checks.checked_config(composed))
    except Exception as error:
        return ReadConfig(None, [], error)


def given_settings(hydra: Any) -> list[str]:
    """The settings given on the command line, as they were: a ${...} in them is not theirs to resolve."""
    settings: list[str] = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # type: ignore[assignment]
    return settings


def settings_of(read: ReadConfig, run_dir: Path, ranks: RankEnvironment | None) -> tuple[Config, list[str]]:
    """The config, and a line for each impossible value, and for each obstacle in the run's folder."""
    if read.config is None:
        raise read.error or AssertionError
    hydra, config = HydraConfig.get(), read.config
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    groups = {group: name for group, name in hydra.runtime.choices.items() if not group.startswith("hydra/")}
    choices, overrides = dict(reversed(groups.items())), given_settings(hydra)
    problems = [explain.with_place(problem, choices, folders, overrides) for problem in read.problems]
    resuming.set_code_when_stopped(config)
    started, of_torchrun = started_ranks(config, ranks)
    problems += of_torchrun
    # An impossible number of ranks has no files to count, and a plan opens none.
    if not problems and room.is_on_host(config) and not config.plan.only:
        problems += room.file_problems(started.num_ranks)
    if not problems and config.train.verify_every and not config.train.deterministic and not room.is_on_host(config):
        problems.append(
            "train.deterministic: got false; it must be true with train.verify_every on GPUs, since ranks compare bits"
        )
    problems += resuming.start_problems(config, run_dir, ranks)
    return config, problems + _folder_problems(config, run_dir, ranks)


def _folder_problems(config: Config, run_dir: Path, ranks: RankEnvironment | None) -> list[str]:
    if ranks is not None and num_restarts():
        return []
    return resuming.folder_problems(config, run_dir, of_sweep=HydraConfig.get().mode == RunMode.MULTIRUN)


def require_sound(
    raw: Config, config: Config, problems: list[str], run_dir: Path, ranks: RankEnvironment | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The data after all checks without ranks, and the checkpoints to go on from. A ConfigError with all problems,
    these and others.

    Args:
        raw: the config with its `auto`.
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
        elif config.checkpoint.resume == resuming.AUTO:
            print(f"checkpoint.resume=auto: no checkpoint in {run_dir} yet, so the run begins at step 0", flush=True)
    except ConfigError as error:
        problems += error.problems
    # Objects are made only from arguments allowed by the signatures, or the same problem would be told twice.
    if not any(
        problem.lstrip("+").startswith((*checks.OPEN_GROUPS, checks.CALLBACKS, "launch")) for problem in problems
    ):
        settings = {problem.partition(":")[0] for problem in problems}
        try:
            with one_thread():
                data_checked = check(config, started.num_local, started.num_ranks, manifest, run_dir)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem.partition(":")[0] not in settings]
    if not has_length and not problems:
        print(f"train.max_steps={config.train.max_steps}, from {length_given(config)}", flush=True)
        raw.train.max_steps = config.train.max_steps
        problems += _folder_problems(raw, run_dir, ranks)  # as only now the run's last step is known
    if problems:
        raise ConfigError(*problems)
    return data_checked, [str(path) for path in to_try]


# `plan.only=true`: a plan in place of a run; and values for `auto`, chosen from plans before the run.


def require_alone(config: Config | None) -> None:
    """Make sure that a plan is made once, by one process.

    Args:
        config: None: it could not be read.

    Raises:
        ConfigError: it is a job of a sweep, or a rank of torchrun.
    """
    if config is None or not config.plan.only:
        return
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("plan.only: got true in a sweep; a plan is of one run and shows all stages: leave out -m")
    if (ranks := RankEnvironment.read()) is not None:
        raise ConfigError(f"plan.only: got true under {ranks.starter}; a plan starts no rank: use python launch.py")


def choose_autos(raw: Config, config: Config, ranks: room.Ranks, run_dir: Path) -> tuple[Config, dict[str, Any] | None]:
    """The config that a run has, and its `Memory.usage_of`; None: nobody has asked for a plan. Each `auto` becomes what
    an earlier run in the folder had; without one it is chosen: the plans and the choice are printed and written there.

    Args:
        raw: the config with its `auto`.
        config: the same, checked, with any values in their place, or those of the earlier run.

    Raises:
        ConfigError: nothing fits.
    """
    names = autos_of(raw)
    if not names and not config.plan.compare:
        return config, None
    memory = _memory(config, ranks)
    if autos_of(choice.as_chosen(raw, run_dir, ranks.num_ranks)):
        fields = _in_a_child(
            lambda: asdict(choice.choose(raw, config, Planner(config, ranks, memory.for_choice(), run_dir)))
        )
        chosen = msgspec.convert(fields, choice.Choice, str_keys=True)
        if not chosen.plan.fits:
            raise ConfigError(chosen.why)
        print_plan(Console(), chosen.plan, config)
        print(chosen.why, flush=True)
        chosen.write(run_dir, raw)
        return choice.with_values(config, chosen.values), chosen.usage()
    if names:
        values = choice.chosen_named(choice.values_in(config, names))
        print(f"auto: {values}, as {PLAN_NAME} of the run's folder has it", flush=True)
    stage = config.zero.stages[0]
    plan = _in_a_child(lambda: asdict(Planner(config, ranks, memory, run_dir).stage(config, stage)))
    return config, memory.usage_of(StagePlan(**plan), stage)


def _in_a_child(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Compute it in a child: plans leave some 90 MB behind in a process, and this one may be a rank of torchrun."""
    with compute_in_child(compute) as computed:
        return computed()


def _memory(config: Config, ranks: room.Ranks) -> Memory:
    return Memory.of_run(config, choose_device(config.launch.device, 0), ranks.num_local)


MAX_TRACEBACK = 20_000
"""Characters."""
OF_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)
"""A scheduler may have a handler of these signals in this process."""


def run_job(composed: DictConfig) -> float | list[float] | None:
    """Run one job, alone or of a sweep.

    Returns:
        In a sweep `sweep.objective`, else the final validation loss in nats. None where it is no number, or the job
        of a sweep has failed: a sweeper takes it for a failed trial, and goes on.

    Raises:
        SystemExit: the job, alone, has failed; a signal has ended it, and with it the sweep; or too many have failed.
        KeyboardInterrupt: Ctrl-C, in a sweep or at once.
    """
    open_fork_server()
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    if hydra.mode == RunMode.MULTIRUN:
        try:
            return _run_in_sweep(composed, run_dir, hydra)
        except (JournalError, ConfigError) as error:  # of all jobs
            print(error, file=sys.stderr)
            raise SystemExit(exits.CONFIG_PROBLEM) from error
    try:
        with locked(run_dir):
            read = read_config(composed)
            if read.config is not None and read.config.plan.only:
                with exits.exits_raised():
                    code = _plan(read, run_dir)
                raise SystemExit(code)
            if read.config is not None and (line := resuming.go_on_if_queued_again(read.config, run_dir)):
                print(line, flush=True)
            result, signum = _run(composed, read, run_dir, overrides=given_settings(hydra))
    except Exception as error:
        failure = failure_of(error, run_dir)
        print(failure, file=sys.stderr)
        with suppress(OSError, ZeroTrainError):  # the failure stays the last word
            if not isinstance(failure, ConfigError) and (paths := resuming.newest_trusted(run_dir)):
                own = (given_settings(hydra), shown_from(Path(hydra.runtime.cwd), run_dir), RankEnvironment.read())
                print(f"to go on from {paths[0].name}: {resuming.command_to_go_on(*own)}", file=sys.stderr)
        raise SystemExit(exits.of_failure(failure)) from error
    print_ending(result, run_dir, Path(hydra.runtime.cwd), RankEnvironment.read(), read.config)
    _end_as_stopped(result, signum, read.config)
    return result.final_val_loss


def _run_in_sweep(composed: DictConfig, hydra_dir: Path, hydra: Any) -> float | list[float] | None:
    from zerotrain.launching.sweep.member import BY_NUMBER, JOB_LOG, Member, devices_of_own

    require_alone(read_config(composed).config)
    sweep = join_sweep(Path(hydra.sweep.dir).absolute())
    subdir = OmegaConf.to_container(hydra, resolve=False)["sweep"]["subdir"]  # type: ignore[index, call-overload]
    read, overrides = read_config(composed), given_settings(hydra)
    member = Member(sweep, hydra.job.num, overrides, read.config)
    member.require_hope()
    with ExitStack() as stack:
        try:
            place = member.take_place(hydra_dir, subdir == BY_NUMBER, stack)
            if place.run_dir != hydra_dir:
                with read_write(hydra):
                    hydra.runtime.output_dir = str(place.run_dir)
                read = read_config(composed)
            if place.result is not None or place.runs_elsewhere:
                return member.leave(place)
            if place.goes_on and read.config is not None:
                read.config.checkpoint.resume = resuming.AUTO
            if read.config is not None:
                stack.enter_context(devices_of_own(member.sweep, read.config))
            if not member.sweep.shows_all:
                stack.enter_context(printed_to(place.run_dir / JOB_LOG))
            stack.enter_context(member.labels())
            result, signum = _run(composed, read, place.run_dir, overrides, member.begin, member.trial)
        except JournalError:
            raise
        except Exception as error:
            member.end_failed(failure_of(error, member.run_dir or hydra_dir), hydra_dir)
            result = None
        except BaseException as ending:
            member.end_stopped()
            signums: dict[Any, int] = {exits.of_signal(number): number for number in OF_SCHEDULERS}
            _hand_on(signums.get(ending.code, 0) if isinstance(ending, SystemExit) else 0)
            raise
    value = None
    if result is not None:
        value = member.end(result.body())
        if result.stopped_by is not None:
            print_place(result, shown_from(Path(hydra.runtime.cwd), place.run_dir))
        _end_as_stopped(result, signum, read.config)
    member.require_hope()
    return value


def failure_of(error: Exception, run_dir: Path) -> ZeroTrainError:
    """An error as the user is told it."""
    is_full = name_full_disk(error, run_dir)
    failure = error if isinstance(error, ZeroTrainError) else RunError(printable(f"{type(error).__name__}: {error}"))
    # An error in a user's class needs its place in the code; a lack of memory or disk has none.
    if failure is not error and not is_full and not isinstance(error, OSError | dist.DistError):
        print(printable("".join(traceback.format_exception(error)), MAX_TRACEBACK), file=sys.stderr)
    return failure


def _end_as_stopped(result: RunResult, signum: int, config: Config | None) -> None:
    """End this process where a signal or control.yaml has stopped its job, and with it the sweep. A job that ended by
    itself, as EarlyStopping or a pruner wants it, ends no other."""
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    by = result.stopped_by
    if is_sweep and not signum and request.is_over(by):
        return
    if by is not None:
        signum = signum or getattr(signal.Signals, by, 0)  # by control.yaml is by no signal
    if is_sweep and signum == signal.SIGINT:
        raise KeyboardInterrupt
    if config is not None and (by is not None or (is_sweep and signum)):
        by = signal.Signals(signum).name if signum else str(by)
        _hand_on(signum)
        if (line := resuming.queue_again(config, by)) is not None:
            print(line, file=sys.stderr)
        ranks = RankEnvironment.read()
        if ranks is None or not _is_of_torchrun(ranks):
            raise SystemExit(code_of_stop(by, config.launch.exit_code_when_stopped))
        # After 0, torchrun waits up to 300 s for the ranks of other hosts, and the signal itself may have ended them.
        is_waited_for = signum and ranks.local_world_size < ranks.world_size
        raise SystemExit(exits.STOPPED if is_waited_for else exits.COMPLETED)


def _is_of_torchrun(ranks: RankEnvironment | None) -> bool:
    """Whether torchrun has started this process: to it each exit code but 0 is a failure, and its own is 1 then."""
    return ranks is not None and ranks.starter == "torchrun"


def _hand_on(signum: int) -> None:
    """Call the handler of a scheduler for a signal beside ours: the one of submitit lets Slurm queue the job again, and
    ends the process."""
    handler = signal.getsignal(signum) if signum in OF_SCHEDULERS else None
    if callable(handler):
        handler(signum, None)


def _run(
    composed: DictConfig,
    read: ReadConfig,
    run_dir: Path,
    overrides: list[str],
    begin: Callable[[], None] = lambda: None,
    trial: dict[str, Any] | None = None,
) -> tuple[RunResult, int]:
    """The result of the run, and the signal to stop this process; 0 for none.

    Args:
        begin: called once all is checked, before the ranks start.
        trial: see `Job.trial`.
    """
    ranks = RankEnvironment.read()
    restarts = 0 if ranks is None else num_restarts()
    try:
        with exits.exits_raised():
            config, problems = settings_of(read, run_dir, ranks)
            result = None if problems or restarts else resuming.completed_already(config, run_dir)
            started, raw = all_ranks(config, ranks), deepcopy(config)
            config = choice.with_least_memory(choice.as_chosen(config, run_dir, started.num_ranks))
            data_checked, resume_from = (None, []) if result else require_sound(raw, config, problems, run_dir, ranks)
            config, of_plan = (config, None) if result else choose_autos(raw, config, started, run_dir)
        if ranks is not None:
            from zerotrain.launching.torchrun import job_exchange

            job_exchange(ranks).require_same_commands(config.launch.start_timeout_s)
    except Exception as error:
        with suppress(OSError):  # the cause matters more than a disk that is full
            write_refusal(run_dir, overrides, str(error), exits.of_failure(error), is_hidden=_is_of_torchrun(ranks))
        raise
    folder = shown_from(Path(HydraConfig.get().runtime.cwd), run_dir)
    if result is not None:
        print(f"{folder} holds this run already, and it is completed; nothing is changed", flush=True)
        return result, 0
    doubts = room.in_memory(config, run_dir) + resuming.doubtful_start(config.launch.max_restarts, ranks)
    _warn(checks.without_effect(raw, started.num_ranks) + checks.doubtful(config) + doubts)
    if config.checkpoint.save_at_end is None:
        config.checkpoint.save_at_end = HydraConfig.get().mode != RunMode.MULTIRUN
    job = Job(
        config=config,
        run_dir=run_dir,
        overrides=overrides,
        data_checked=data_checked,
        resume_from=resume_from,
        restarts=restarts,
        trial=trial,
        planned=of_plan,
    )
    if restarts:
        job = resuming.going_on(job)
        print(f"restart {restarts} from {resuming.place_of_restart(run_dir)}", file=sys.stderr)
    stages, step = resuming.stages_to_come(config, [Path(path) for path in job.resume_from])
    job = replace(job, stage=stage_at(stages, step))
    begin()
    job.open_folder()
    _save_composition(composed, run_dir / ".hydra")
    print(f"{stages_named(stages, step)}, ranks: {started.num_ranks}, run folder: {folder}", flush=True)
    if ranks is None:
        return _run_spawned(job, started.num_ranks)
    return RunResult(**run_under_torchrun(job, ranks)), 0


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _plan(read: ReadConfig, run_dir: Path) -> int:
    """Print a plan in place of a run; return the exit code."""
    require_alone(read.config)
    config, problems = settings_of(read, run_dir, None)
    raw, config = deepcopy(config), choice.with_least_memory(config)
    require_sound(raw, config, problems, run_dir, None)
    ranks = all_ranks(config, None)
    _warn(checks.without_effect(raw, ranks.num_ranks))
    memory = _memory(config, ranks)
    planner = Planner(config, ranks, memory.for_choice() if autos_of(raw) else memory, run_dir)
    chosen = choice.choose(raw, config, planner) if autos_of(raw) else None
    plan = planner.run(config) if chosen is None else chosen.plan
    print_plan(Console(), plan, config)
    if chosen is None:
        plan.write(run_dir)
    else:
        print(chosen.why)
        chosen.write(run_dir, raw)
    print(f"plan: {shown_from(Path(HydraConfig.get().runtime.cwd), run_dir) / PLAN_NAME}", flush=True)
    return exits.COMPLETED if plan.fits else exits.DOES_NOT_FIT


def run_under_torchrun(job: Job, ranks: RankEnvironment) -> dict[str, Any]:
    """Hand a job to torchrun's other ranks, and run this one's; end the process if the job does not complete."""
    from zerotrain.launching.torchrun import job_exchange, run_here  # a plain run needs none of it

    job_exchange(ranks).publish(job)
    try:
        job_exchange(ranks).prepare_data(job)
    except ZeroTrainError as error:
        write_ending(job, ranks.world_size, status="failed", error=str(error), code=exits.of_failure(error))
        raise
    return run_here(job, ranks)


def _save_composition(composed: DictConfig, folder: Path) -> None:
    """Write what Hydra would have written before it called us, when the folder might still be another run's."""
    folder.mkdir(exist_ok=True)
    whole = {"config": composed, "hydra": HydraConfig.instance().cfg, "overrides": HydraConfig.get().overrides.task}
    for name, values in whole.items():
        with open(folder / f"{name}.yaml", "w", encoding="utf-8", opener=only_regular) as file:
            OmegaConf.save(values, file)


def _run_spawned(job: Job, num_ranks: int) -> tuple[RunResult, int]:
    attempts = resuming.Attempts(job)
    try:
        signum = run_ranks(attempts, num_ranks)
    except Exception as error:
        cause = str(error) if isinstance(error, ZeroTrainError) else printable(f"{type(error).__name__}: {error}")
        with suppress(OSError):  # the cause matters more than a disk that is full
            write_ending(attempts.job, num_ranks, status="failed", error=cause, code=exits.of_failure(error))
        raise
    except (KeyboardInterrupt, SystemExit) as ending:
        code = code_of(ending) if isinstance(ending, SystemExit) else exits.of_signal(signal.SIGINT)
        with suppress(OSError, UntrustedFileError):
            if (result := resuming.completed_in(job.run_dir)) is not None:  # other ranks had ended before it came
                return result, max(0, code - 128)
            write_ending(attempts.job, num_ranks, status="stopped", error="stopped by a signal", code=code)
        raise
    try:
        return RunResult.read(job.run_dir / RESULT_NAME), signum
    except UntrustedFileError as error:
        raise RunError(f"{job.run_dir / RESULT_NAME}: {error}") from error


# The last lines of a run.


def shown_from(cwd: Path, path: Path) -> Path:
    """A path as a user who works in `cwd` would write it."""
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


def print_ending(
    result: RunResult, run_dir: Path, cwd: Path, ranks: RankEnvironment | None, config: Config | None
) -> None:
    """Say where a completed run lies, or one stopped in order, and how to go on with it: for as long again."""
    folder = shown_from(cwd, run_dir)
    print_place(result, folder)
    if result.checkpoint is not None:
        lengths = {"max_steps": result.steps}
        if config is not None:  # a run has one length, which may stand in a yaml
            own = {name: getattr(config.train, name) for name in ("num_epochs", "max_tokens")}
            lengths = {name: length for name, length in own.items() if length is not None} or lengths
        is_completed = result.status == "completed"
        changes = [f"train.{name}={2 * length:.15g}" for name, length in lengths.items() if is_completed]
        command = resuming.command_to_go_on(result.overrides or [], folder, ranks, *changes)
        print(f"to go on: {command}", flush=True)
    else:
        print(
            "next: checkpoint.save_at_end=true lets a run train longer later; --cfg job shows every setting",
            flush=True,
        )


def print_place(result: RunResult, folder: Path) -> None:
    """Say how a run has ended, and what lies in its folder."""
    files = f"result.json, metrics.jsonl, ranks/{'' if result.checkpoint is None else ', checkpoints/'}"
    print(f"{result.error or 'completed'}; in {folder}: {files}", flush=True)
