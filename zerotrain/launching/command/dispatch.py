"""launch.py as a command: which process does what, what is read of a failure, and the exit code.

Imports no torch, since tab completion comes through here.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.words import quoted
from zerotrain.device.processes import end_with_parent
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files.kept_out import require_here
from zerotrain.files.terminal import code_of, outlast_readers, with_output_written
from zerotrain.launching.command.command_line import composed_once, is_sweep, problems_with, put_options_last
from zerotrain.launching.end import exits
from zerotrain.launching.start.imports import importing
from zerotrain.launching.sweep import table
from zerotrain.launching.sweep.driver import driven, find_latest
from zerotrain.launching.sweep.study import StudyError, StudyIsFullError


def dispatch(main: Callable[[], None], conf: Path) -> NoReturn:
    """Do this process's part of the command line, and exit.

    Started by hand, it composes and starts the ranks. Under torchrun every rank gets here: rank 0 composes and shares
    the job, or tells the others that there is none, except for a sweep on one machine, which the first rank drives as
    if started by hand, with ranks of its own.

    Args:
        main: the function that `hydra.main` has decorated.
        conf: the folder of its configs.
    """
    try:
        sys.exit(_exit_code(main, conf))
    except KeyboardInterrupt:
        sys.exit(exits.of_signal(signal.SIGINT))


def _exit_code(main: Callable[[], None], conf: Path) -> int:
    outlast_readers()
    require_here()
    # Users name classes of modules that lie in the folder they work in.
    sys.path.append(os.getcwd())
    # Hydra then passes its exceptions on instead of printing them in its own way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        ranks = RankEnvironment.read()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exits.CONFIG_PROBLEM
    if ranks is None:
        return _run_hydra(main, conf)
    # Torchrun ends its ranks, but not when it is killed itself.
    end_with_parent(signal.SIGTERM)
    if ranks.local_world_size < ranks.world_size:  # a rank that ended of its command line would be waited for
        return _run_as_rank(main, conf, ranks)
    put_options_last(sys.argv)
    return _drive_sweep(main, conf, ranks) if is_sweep() else _run_as_rank(main, conf, ranks)


def _run_as_rank(main: Callable[[], None], conf: Path, ranks: RankEnvironment) -> int:
    with importing():
        from zerotrain.launching.job.resuming import with_run_dir
        from zerotrain.launching.start.torchrun import job_exchange, run_here

    try:
        exchange = job_exchange(ranks)
        if ranks.rank == 0 and (run_dir := exchange.run_dir_before()) is not None:
            sys.argv[1:] = with_run_dir(sys.argv[1:], run_dir)
        job = None if ranks.rank == 0 else exchange.receive()
        if job is not None:
            exchange.prepare_data(job)
    except ZeroTrainError as error:
        if ranks.local_rank == 0 or not isinstance(error, ConfigError):
            print(error, file=sys.stderr)
        return exits.CONFIG_PROBLEM if isinstance(error, ConfigError) else exits.FAILED
    except KeyboardInterrupt:
        return exits.of_signal(signal.SIGINT)
    if ranks.rank == 0:
        code = exits.FAILED
        try:
            code = _run_hydra(main, conf, may_sweep=False)
        finally:
            exchange.withdraw(code)
        return code
    if job is not None:
        run_here(job, ranks)
    return exits.COMPLETED


def _drive_sweep(main: Callable[[], None], conf: Path, ranks: RankEnvironment) -> int:
    if ranks.rank > 0:
        return exits.COMPLETED
    ranks.leave()
    if not any("launch.nproc_per_node=" in argument for argument in sys.argv):
        sys.argv.insert(1, f"launch.nproc_per_node={ranks.local_world_size}")
    return _run_hydra(main, conf)


def _run_hydra(main: Callable[[], None], conf: Path, may_sweep: bool = True) -> int:
    """Run Hydra on the command line; return the exit code."""
    try:
        put_options_last(sys.argv)
        if not may_sweep and is_sweep():
            print(
                "-m: a sweep runs on one machine; with torchrun on several, start each job by itself", file=sys.stderr
            )
            return exits.CONFIG_PROBLEM
        find_latest(sys.argv)
        with composed_once(conf):
            _run_to_its_end(main)
        code = exits.COMPLETED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would cut off the table of the sweep
        print("stopped by Ctrl-C", file=sys.stderr)
        code = exits.of_signal(signal.SIGINT)
    except SystemExit as ending:
        code = code_of(ending)
    except StudyError as error:
        print(error, file=sys.stderr)
        code = exits.FAILED
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = exits.CONFIG_PROBLEM
    except Exception as error:  # jobs raise nothing else
        problems = problems_with(error, conf)
        of_disk = [str(error)] if isinstance(error, OSError) else []
        for problem in problems or of_disk or traceback.format_exception(error):
            print(problem, file=sys.stderr)
        code = exits.CONFIG_PROBLEM if problems else exits.FAILED
    return with_output_written(table.report(code))


def _run_to_its_end(main: Callable[[], None]) -> None:
    """Run Hydra; again, where other drivers of a study have left fewer trials than were its own to run."""
    while True:
        try:
            return main()
        except StudyIsFullError:
            if (found := driven()) is not None and not any(each.startswith("hydra.sweep.dir=") for each in sys.argv):
                sys.argv.insert(1, f"hydra.sweep.dir={quoted(str(found[0].folder))}")  # the default has the time in it
