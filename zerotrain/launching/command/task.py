"""The function that Hydra calls for each job: check the config, run the ranks, return the objective."""

import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.config.checks import doubtful, without_effect
from zerotrain.config.compose import first_paragraph
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.terminal import code_of, printed_to
from zerotrain.files.untrusted import UntrustedFileError, only_regular, printable
from zerotrain.launching.command.checking import ReadConfig, given_settings, read_config, require_sound, settings_of
from zerotrain.launching.command.ending import print_ending, print_place, shown_from
from zerotrain.launching.command.placing import all_ranks
from zerotrain.launching.command.planned import chosen, planned, require_alone
from zerotrain.launching.end import exits
from zerotrain.launching.end.failures import RunError, name_full_disk
from zerotrain.launching.job import earlier, resuming
from zerotrain.launching.job.folder_lock import locked
from zerotrain.launching.job.job import Job, write_ending, write_refusal
from zerotrain.launching.job.restarts import Attempts, going_on, place_of_restart
from zerotrain.launching.job.scheduled import go_on_if_queued_again, queue_again
from zerotrain.launching.job.started import doubtful_start
from zerotrain.launching.start.fork_server import open_fork_server
from zerotrain.launching.start.spawn import run_ranks
from zerotrain.launching.start.torchrun import job_exchange, run_here
from zerotrain.launching.sweep.driver import joined
from zerotrain.launching.sweep.member import BY_NUMBER, JOB_LOG, Member, Value, named_by_trial
from zerotrain.launching.sweep.slots import devices_of_own
from zerotrain.preflight.choice import as_chosen, with_least_memory
from zerotrain.preflight.room import in_memory
from zerotrain.report.journal import JournalError
from zerotrain.training.callbacks.stages import stage_at, stages_named
from zerotrain.training.request import is_over
from zerotrain.training.result import RESULT_NAME, code_of_stop, read_result

MAX_TRACEBACK = 20_000
"""Characters."""
OF_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals of which a scheduler may have a handler in this process."""


def run_job(composed: DictConfig) -> Value:
    """Run one job, alone or of a sweep.

    Returns:
        In a sweep `sweep.objective`, else the final validation loss in nats. None where it is no number, or the job
        of a sweep has failed: to a sweeper that is a failed trial, after which it goes on.

    Raises:
        SystemExit: the job, alone, has failed; a signal has ended it, and with it the sweep; or too many have failed.
        KeyboardInterrupt: Ctrl-C, in a sweep or at once.
    """
    open_fork_server()
    hydra = HydraConfig.get()
    run_dir = _run_dir()
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
            if read.config is not None and (line := go_on_if_queued_again(read.config, run_dir)):
                print(line, flush=True)
            result, signum = _run(composed, read, run_dir, overrides=given_settings(hydra))
    except Exception as error:
        failure = _told(error, run_dir)
        print(failure, file=sys.stderr)
        raise SystemExit(_code_of(failure)) from error
    print_ending(result, run_dir, Path.cwd(), RankEnvironment.read())
    _end_as_stopped(result, signum, read.config)
    return result["final_val_loss"]


def _run_in_sweep(composed: DictConfig, named: Path, hydra: Any) -> Value:
    require_alone(read_config(composed).config)
    sweep = joined(Path(hydra.sweep.dir).absolute())
    subdir = OmegaConf.to_container(hydra, resolve=False)["sweep"]["subdir"]  # type: ignore[index, call-overload]
    if sweep.study is not None:
        named = named_by_trial(sweep.study, named, hydra, subdir == BY_NUMBER)
    read, overrides = read_config(composed), given_settings(hydra)
    member = Member(sweep, hydra.job.num, overrides, read.config)
    member.require_hope()
    with ExitStack() as stack:
        try:
            place = member.take_place(named, subdir == BY_NUMBER, stack)
            if place.run_dir != named:
                with read_write(hydra):
                    hydra.runtime.output_dir = str(place.run_dir)
                read = read_config(composed)
            if place.taken is not None or place.runs_elsewhere:
                return member.leave(place)
            if place.goes_on and read.config is not None:
                read.config.checkpoint.resume = earlier.AUTO
            if read.config is not None:
                stack.enter_context(devices_of_own(member.sweep, read.config))
            if not member.sweep.shows_all:
                stack.enter_context(printed_to(place.run_dir / JOB_LOG))
            stack.enter_context(member.named())
            result, signum = _run(composed, read, place.run_dir, overrides, member.begin, member.trial)
        except JournalError:
            raise
        except Exception as error:
            member.end_failed(_told(error, member.run_dir or named), named)
            result = None
        except BaseException as ending:
            member.end_stopped()
            came: dict[Any, int] = {exits.of_signal(each): each for each in OF_SCHEDULERS}
            _hand_on(came.get(ending.code, 0) if isinstance(ending, SystemExit) else 0)
            raise
    value = None
    if result is not None:
        value = member.end(result)
        if result["stopped_by"] is not None:
            print_place(result, shown_from(Path.cwd(), place.run_dir))
        _end_as_stopped(result, signum, read.config)
    member.require_hope()
    return value


def _told(error: Exception, run_dir: Path) -> ZeroTrainError:
    """An error as the user is told it."""
    is_full = name_full_disk(error, run_dir)
    said = printable(f"{type(error).__name__}: {error}")
    failure = error if isinstance(error, ZeroTrainError) else RunError(said)
    # Of a user's class that was tried out, the user needs to see where; not of what the machine has too little of.
    if failure is not error and not is_full and not isinstance(error, OSError | dist.DistError):
        print(printable("".join(traceback.format_exception(error)), MAX_TRACEBACK), file=sys.stderr)
    return failure


def _end_as_stopped(result: dict[str, Any], signum: int, config: Config | None) -> None:
    """End this process where a signal or control.yaml has stopped its job, and with it the sweep. A job that ended by
    itself, as EarlyStopping or a pruner wants it, ends no other."""
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if is_sweep and not signum and is_over(result["stopped_by"]):
        return
    by = result["stopped_by"]
    if by is not None:
        signum = signum or getattr(signal.Signals, by, 0)  # by control.yaml is by no signal
    if is_sweep and signum == signal.SIGINT:
        raise KeyboardInterrupt
    if config is not None and (by is not None or (is_sweep and signum)):
        by = signal.Signals(signum).name if signum else by
        _hand_on(signum)
        if (line := queue_again(config, by)) is not None:
            print(line, file=sys.stderr)
        ranks = RankEnvironment.read()
        if ranks is None or not _is_of_torchrun(ranks):
            raise SystemExit(code_of_stop(by, config.launch.exit_code_when_stopped))
        # After 0, torchrun waits up to 300 s for those of the other hosts, which the signal itself may have ended.
        is_waited_for = signum and ranks.local_world_size < ranks.world_size
        raise SystemExit(exits.STOPPED if is_waited_for else exits.COMPLETED)


def _code_of(error: Exception) -> int:
    return exits.CONFIG_PROBLEM if isinstance(error, ConfigError) else exits.FAILED


def _is_of_torchrun(ranks: RankEnvironment | None) -> bool:
    """Whether torchrun has started this process: to it each exit code but 0 is a failure, and its own is 1 then."""
    return ranks is not None and ranks.starter == "torchrun"


def _hand_on(signum: int) -> None:
    """Call the handler that this process has for a signal beside ours: that of submitit lets Slurm queue the job again,
    and ends the process."""
    handler = signal.getsignal(signum) if signum in OF_SCHEDULERS else None
    if callable(handler):
        handler(signum, None)


def _run_dir() -> Path:
    try:
        return Path(HydraConfig.get().runtime.output_dir)
    except OmegaConfBaseException as error:  # Hydra has resolved the name, made the folder, and resolves the name again
        print(f"hydra.run.dir: {first_paragraph(error)}; a folder's name cannot hold `${{`", file=sys.stderr)
        raise SystemExit(exits.CONFIG_PROBLEM) from error


def _run(
    composed: DictConfig,
    read: ReadConfig,
    run_dir: Path,
    overrides: list[str],
    begin: Callable[[], None] = lambda: None,
    trial: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], int]:
    """The body of result.json, and the signal to stop that has come to this process; 0 for none.

    Args:
        begin: called once all is checked, before the ranks start.
        trial: see `Job.trial`.
    """
    ranks = RankEnvironment.read()
    restarts = 0 if ranks is None else num_restarts()
    try:
        with exits.exits_raised():
            config, problems = settings_of(read, run_dir, ranks)
            kept = None if problems or restarts else earlier.completed_already(config, run_dir)
            started, asked = all_ranks(config, ranks), deepcopy(config)
            config = with_least_memory(as_chosen(config, run_dir, started.num_ranks))
            data_checked, resume_from = (None, []) if kept else require_sound(asked, config, problems, run_dir, ranks)
            config, of_plan = (config, None) if kept else chosen(asked, config, started, run_dir)
        if ranks is not None:
            job_exchange(ranks).require_same_commands(config.launch.start_timeout_s)
    except Exception as error:
        with suppress(OSError):  # the cause matters more than a disk that is full
            write_refusal(run_dir, overrides, str(error), _code_of(error), is_hidden=_is_of_torchrun(ranks))
        raise
    shown = shown_from(Path.cwd(), run_dir)
    if kept is not None:
        print(f"{shown} holds this run already, and it is completed; nothing is changed", flush=True)
        return kept, 0
    more = in_memory(config, run_dir) + doubtful_start(config.launch.max_restarts, ranks)
    _warn(without_effect(asked, started.num_ranks) + doubtful(config) + more)
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
        job = going_on(job)
        print(f"restart {restarts} from {place_of_restart(run_dir)}", file=sys.stderr)
    stages, step = resuming.stages_to_come(config, [Path(each) for each in job.resume_from])
    job = replace(job, stage=stage_at(stages, step))
    begin()
    job.open_folder()
    _save_composition(composed, run_dir / ".hydra")
    print(f"{stages_named(stages, step)}, ranks: {started.num_ranks}, run folder: {shown}", flush=True)
    return _run_spawned(job, started.num_ranks) if ranks is None else (_run_under_torchrun(job, ranks), 0)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _plan(read: ReadConfig, run_dir: Path) -> int:
    """Print a plan in place of a run; return the exit code."""
    require_alone(read.config)
    config, problems = settings_of(read, run_dir, None)
    asked, config = deepcopy(config), with_least_memory(config)
    require_sound(asked, config, problems, run_dir, None)
    ranks = all_ranks(config, None)
    _warn(without_effect(asked, ranks.num_ranks))
    return planned(asked, config, ranks, run_dir, shown_from(Path.cwd(), run_dir))


def _run_under_torchrun(job: Job, ranks: RankEnvironment) -> dict[str, Any]:
    job_exchange(ranks).publish(job)
    try:
        job_exchange(ranks).prepare_data(job)
    except ZeroTrainError as error:
        write_ending(job, ranks.world_size, status="failed", error=str(error))
        raise
    return run_here(job, ranks)


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
    except (KeyboardInterrupt, SystemExit) as ending:
        code = code_of(ending) if isinstance(ending, SystemExit) else exits.of_signal(signal.SIGINT)
        with suppress(OSError):
            write_ending(attempts.job, num_ranks, status="stopped", error="stopped by a signal", code=code)
        raise
    try:
        return read_result(job.run_dir / RESULT_NAME), signum
    except UntrustedFileError as error:
        raise RunError(f"{job.run_dir / RESULT_NAME}: {error}") from error
