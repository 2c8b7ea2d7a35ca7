"""launch.py as a command: the problems of a command line, the work of each process, and the exit code.

Imports no torch, since tab completion comes through here.
"""

import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, errors

from zerotrain.comm.environment import RankEnvironment
from zerotrain.config import compose, explain, words
from zerotrain.device.processes import end_with_parent
from zerotrain.errors import ConfigError, ZeroTrainError
from zerotrain.files import here_last, terminal, untrusted
from zerotrain.launching import exits
from zerotrain.launching.imports import importing
from zerotrain.launching.sweep.telling import report, settle_folders

PRIMARY_CONFIG = "train"


def put_options_last(arguments: list[str]) -> None:
    """Let settings stand on both sides of an option: Hydra knows none behind it if there are some in front of it.

    Args:
        arguments: `sys.argv`, changed in place.

    Raises:
        ConfigError: there is no such option, such as a setting in the form of other programs.
    """
    _, unknown = get_args_parser().parse_known_args(arguments[1:])
    problems = []
    for option in (word for word in unknown if word.startswith("-")):
        name, _, value = option.lstrip("-").replace("-", "_").partition("=")
        setting = f"{name}={value or 'VALUE'}" if "." in name else "settings, such as zero.stage=3,"
        meant = words.we_call_it(name, value) or f"; write {setting}"
        problems.append(untrusted.printable(f"{option}: there is no such option{meant} without dashes", keep=""))
    if problems:
        raise ConfigError(*problems)
    settings = get_args_parser().parse_intermixed_args(arguments[1:]).overrides
    waiting, options = list(settings), []
    for argument in arguments[1:]:
        if waiting and argument == waiting[0]:
            del waiting[0]
        else:
            options.append(argument)
    arguments[1:] = [*settings, *options]


def is_sweep() -> bool:
    """Whether this process was asked for a sweep."""
    arguments = get_args_parser().parse_args()
    return arguments.multirun or "hydra.mode=MULTIRUN" in arguments.overrides


def problems_with(error: Exception, conf: Path) -> list[str]:
    """The faults of the command line that made Hydra, or composing, raise an exception; none if something else did.

    Args:
        conf: the folder of the configs, where the command line names no other.
    """
    arguments = get_args_parser().parse_args()
    folders = config_folders(arguments, conf)
    is_of_grid = Path(traceback.extract_tb(error.__traceback__)[-1].filename).stem == "basic_sweeper"
    if is_of_grid and (problems := explain.interval_problems(arguments.overrides)):
        return problems
    try:
        with composing(folders, arguments.config_name or PRIMARY_CONFIG) as compose_job:
            problems = explain.composition_problems(
                arguments.overrides, compose_job, is_sweep=is_sweep(), folders=folders
            )
    except ConfigError as refusal:
        problems = list(refusal.problems)
    except Exception:  # of Hydra: there is no end to what it raises
        problems = []
    if not problems and isinstance(error, OSError) and error.filename is not None and error.errno not in exits.NO_ROOM:
        setting = "hydra.sweep.dir" if is_sweep() else "hydra.run.dir"
        problems = [f"{setting}: {error.filename} cannot be made: {error.strerror}; give a folder that can be written"]
    if not problems and isinstance(error, errors.OmegaConfBaseException) and error.full_key:
        problems = [f"{error.full_key}: {compose.first_paragraph(error)}"]
    if not problems and isinstance(error, HydraException | ValueError):
        problems = [compose.first_paragraph(error)]
    if not problems and not isinstance(error, OSError) and not _comes_from_user(error):
        problems = [f"the command line cannot be run: {type(error).__name__}: {compose.first_paragraph(error)}"]
    return [untrusted.printable(problem, keep="") for problem in problems]


def _comes_from_user(error: Exception) -> bool:
    """Whether an exception was raised in code of the user, neither ours nor installed."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if os.path.isabs(frame.filename)]
    installed = {sys.prefix, sys.base_prefix, *map(str, Path(__file__).resolve().parents[:3])}
    return not any(Path(frames[-1]).is_relative_to(folder) for folder in installed)  # compiled code has no path


def config_folders(arguments: Namespace, conf: Path) -> list[Path]:
    """The folders of the yamls, in the order of the search."""
    primary = conf if arguments.config_path is None else conf.parent / arguments.config_path
    extra = [] if arguments.config_dir is None else [Path(arguments.config_dir)]
    return [folder for folder in (*extra, primary) if folder.is_dir()]


@contextmanager
def composing(folders: Sequence[Path], name: str = PRIMARY_CONFIG) -> Iterator[Callable[[list[str]], DictConfig]]:
    """Inside, a function composes a config out of settings.

    Args:
        folders: of the yamls, in the order in which they are looked for; the last has those of the package.
        name: of the yaml to begin with.
    """
    *extra, primary = folders
    paths = ",".join(words.quote(f"file://{path.absolute()}") for path in extra)
    searched = [f"hydra.searchpath=[{paths}]"] if extra else []
    with hydra.initialize_config_dir(config_dir=str(primary.resolve()), version_base="1.3"):
        yield lambda settings: hydra.compose(name, [*settings, *searched])


# The work of each process, and the exit code of a failure.


def dispatch(main: Callable[[], None], conf: Path) -> NoReturn:
    """Do this process's part of the command line, and exit.

    Started by hand, it composes and starts the ranks. Under torchrun every rank gets here: rank 0 composes and shares
    the job, or tells the others that there is none. A sweep on one machine is driven by the first rank, as if started
    by hand, with ranks of its own.

    Args:
        main: the function that `hydra.main` has decorated.
        conf: the folder of its configs.
    """
    try:
        sys.exit(_exit_code(main, conf))
    except KeyboardInterrupt:
        sys.exit(exits.of_signal(signal.SIGINT))


def _exit_code(main: Callable[[], None], conf: Path) -> int:
    terminal.outlast_readers()
    here_last.require_here()
    # Users name classes of modules in their working folder.
    sys.path.append(os.getcwd())
    # Hydra then passes its exceptions on instead of printing them in its own way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    ranks = None
    try:
        ranks = RankEnvironment.read()
        # On several machines a rank that ended of its command line would be waited for.
        if ranks is not None and ranks.local_world_size == ranks.world_size:
            put_options_last(sys.argv)
    except ConfigError as error:
        if ranks is None or ranks.rank == 0:
            print(error, file=sys.stderr)
        return exits.CONFIG_PROBLEM
    if ranks is None:
        return _run_hydra(main, conf)
    # Torchrun ends its ranks, but not when it is killed itself.
    end_with_parent(signal.SIGTERM)
    if ranks.local_world_size < ranks.world_size or not is_sweep():
        return run_as_rank(lambda: _run_hydra_as_first(main, conf, ranks), ranks)
    if ranks.rank > 0:
        return exits.COMPLETED
    ranks.leave()
    if not any("launch.nproc_per_node=" in argument for argument in sys.argv):
        sys.argv.insert(1, f"launch.nproc_per_node={ranks.local_world_size}")
    return _run_hydra(main, conf)


def run_as_rank(lead: Callable[[], int], ranks: RankEnvironment) -> int:
    """Do the work of a rank that torchrun has started; return its exit code.

    Args:
        lead: the work of rank 0, which publishes a job for the others; returns its exit code.
    """
    with importing():
        from zerotrain.launching.torchrun import job_exchange, run_here

    try:
        exchange = job_exchange(ranks)
        job = None if ranks.rank == 0 else exchange.receive()
        if job is not None:
            exchange.prepare_data(job)
    except ZeroTrainError as error:
        if ranks.local_rank == 0 or not isinstance(error, ConfigError):
            print(error, file=sys.stderr)
        return exits.of_failure(error)
    except KeyboardInterrupt:
        return exits.of_signal(signal.SIGINT)
    if ranks.rank == 0:
        code = exits.FAILED
        try:
            code = lead()
        finally:
            exchange.withdraw(code)
        return code
    if job is not None:
        run_here(job, ranks)
    return exits.COMPLETED


def _run_hydra_as_first(main: Callable[[], None], conf: Path, ranks: RankEnvironment) -> int:
    """`_run_hydra` as rank 0 of torchrun; after a restart in the folder of the attempt before."""
    from zerotrain.launching.resuming import with_run_dir
    from zerotrain.launching.torchrun import job_exchange

    if (run_dir := job_exchange(ranks).run_dir_before()) is not None:
        sys.argv[1:] = with_run_dir(sys.argv[1:], run_dir)
    return _run_hydra(main, conf, may_sweep=False)


def _run_hydra(main: Callable[[], None], conf: Path, may_sweep: bool = True) -> int:
    """Run Hydra on the command line; return the exit code."""
    try:
        put_options_last(sys.argv)
        if not may_sweep and is_sweep():
            print(
                "-m: a sweep runs on one machine; with torchrun on several, start each job by itself", file=sys.stderr
            )
            return exits.CONFIG_PROBLEM
        settle_folders(sys.argv)
        main()
        code = exits.COMPLETED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would cut off the table of the sweep
        print("stopped by Ctrl-C", file=sys.stderr)
        code = exits.of_signal(signal.SIGINT)
    except SystemExit as ending:
        code = terminal.code_of(ending)
    except ZeroTrainError as error:
        print(error, file=sys.stderr)
        code = exits.of_failure(error)
    except Exception as error:  # jobs raise nothing else
        problems = problems_with(error, conf)
        of_disk = [str(error)] if isinstance(error, OSError) else []
        for problem in problems or of_disk or traceback.format_exception(error):
            print(problem, file=sys.stderr)
        code = exits.CONFIG_PROBLEM if problems else exits.FAILED
    return terminal.with_output_written(report(code))
