"""The problems of a command line that Hydra would not run, a line for each. Imports no torch."""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zerotrain.config.compose import first_paragraph
from zerotrain.config.explain import composition_problems, parsed_override
from zerotrain.config.words import did_you_mean, interpolation_line, quoted
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.launching.end import exits

PRIMARY_CONFIG = "train"
_OF_PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")


def put_options_last(arguments: list[str]) -> None:
    """Let settings stand on both sides of an option: Hydra does not know those behind one that follows others.

    Args:
        arguments: `sys.argv`, changed in place.
    """
    try:
        settings = get_args_parser().parse_intermixed_args(arguments[1:]).overrides
    except TypeError:  # of a parser that has learnt what cannot be intermixed
        return
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


@contextmanager
def composed_once(conf: Path) -> Iterator[None]:
    """Spare a start 0.15 s: Hydra composes the whole config once more, to see whether a yaml has set `hydra.mode`, and
    is not asked where none can have.

    Args:
        conf: the folder of the configs.
    """
    arguments = get_args_parser().parse_args()
    elsewhere = (arguments.config_dir, arguments.config_path, arguments.config_name)
    if any(elsewhere) or any("hydra.mode" in each for each in arguments.overrides) or _set_a_mode(conf):
        yield
        return
    with patch.object(Hydra, "get_mode", lambda *_, **__: None):
        yield


def _set_a_mode(conf: Path) -> bool:
    """Whether a yaml in a folder may say how Hydra runs: it has a `mode`, and Hydra's name in it or in its place."""
    files = {path: path.read_bytes() for path in conf.rglob("*.yaml") if path.is_file()}
    return any(b"mode:" in text and b"hydra" in bytes(path) + text for path, text in files.items())


def problems_with(error: Exception, conf: Path) -> list[str]:
    """Why Hydra, or composing, has raised an exception; nothing where that is no fault of the command line.

    Args:
        conf: the folder of the configs, where the command line names no other.
    """
    arguments = get_args_parser().parse_args()
    problems = list(_folder_problems(arguments, conf)) or list(_interval_problems(arguments))
    if not problems:
        try:
            folders = config_folders(arguments, conf)
            with composing(folders, arguments.config_name or PRIMARY_CONFIG) as compose:
                problems = composition_problems(arguments.overrides, compose, is_sweep=is_sweep(), folders=folders)
        except ConfigError as found:
            problems = list(found.problems)
        except Exception:  # of Hydra: there is no end to what it raises
            problems = []
    problems += [] if problems else _plugin_problems(arguments)
    if not problems and isinstance(error, OmegaConfBaseException) and str(error.full_key or "").startswith("hydra."):
        problems = [interpolation_line(str(error.full_key), _raw_value(error), error)]
    if not problems and isinstance(error, OSError) and error.filename is not None and error.errno not in exits.NO_ROOM:
        setting = "hydra.sweep.dir" if is_sweep() else "hydra.run.dir"
        problems = [f"{setting}: {error.filename} cannot be made: {error.strerror}; give a folder that can be written"]
    if not problems and isinstance(error, HydraException | ValueError):
        problems = [first_paragraph(error)]
    if not problems and not isinstance(error, OSError) and not _comes_from_user(error):
        problems = [f"the command line cannot be run: {type(error).__name__}: {first_paragraph(error)}"]
    return [printable(problem, keep="") for problem in problems]


def _comes_from_user(error: Exception) -> bool:
    """Whether an exception was raised in code that is neither ours nor installed."""
    frames = [each.filename for each in traceback.extract_tb(error.__traceback__) if os.path.isabs(each.filename)]
    installed = {sys.prefix, sys.base_prefix, *map(str, Path(__file__).resolve().parents[:3])}
    return not any(Path(frames[-1]).is_relative_to(folder) for folder in installed)  # compiled code has no path


def _plugin_problems(arguments: Namespace) -> list[str]:
    """Hydra makes nothing of other classes, and says so only to who starts a sweep."""
    problems = []
    for override in arguments.overrides:
        key, _, target = override.lstrip("+").partition("=")
        if key in ("hydra.launcher._target_", "hydra.sweeper._target_") and not target.startswith(_OF_PLUGINS):
            group = key.removeprefix("hydra.").partition(".")[0]
            problems.append(f"{key}: got {target}; it must be a class of a Hydra plugin; hydra/{group}=... chooses one")
    return problems


def _folder_problems(arguments: Namespace, conf: Path) -> Iterator[str]:
    here = Path.cwd()
    if arguments.config_dir is not None and not Path(arguments.config_dir).is_dir():
        yield f"--config-dir: got {arguments.config_dir}; there is no such folder in {here}"
    if arguments.config_path is not None and not (conf.parent / arguments.config_path).is_dir():
        yield (
            f"--config-path: got {arguments.config_path}; there is no such folder in {conf.parent}; "
            "--config-dir adds a folder of your own to conf"
        )
        return
    names = sorted(path.stem for folder in config_folders(arguments, conf) for path in folder.glob("*.yaml"))
    name = arguments.config_name
    if name is None and arguments.config_path is not None and PRIMARY_CONFIG not in names:
        yield (
            f"--config-path: got {arguments.config_path}, which has no {PRIMARY_CONFIG}.yaml; give --config-name, or "
            "--config-dir, which adds a folder of your own to conf"
        )
    if name is not None and name.removesuffix(".yaml") not in names and "/" not in name:
        yield f"--config-name: got {name}; there is no such config{did_you_mean(name, names)}; there are " + (
            ", ".join(names) or "none"
        )


def config_folders(arguments: Namespace, conf: Path) -> list[Path]:
    """The folders that the yamls come from, in the order in which they are looked for."""
    primary = conf if arguments.config_path is None else conf.parent / arguments.config_path
    given = [] if arguments.config_dir is None else [Path(arguments.config_dir)]
    return [folder for folder in (*given, primary) if folder.is_dir()]


def _interval_problems(arguments: Namespace) -> Iterator[str]:
    if any(override.startswith("hydra/sweeper=") for override in arguments.overrides):
        return
    for override in arguments.overrides:
        parsed = parsed_override(override)
        if parsed is not None and isinstance(parsed.value(), IntervalSweep) and is_sweep():
            key = parsed.get_key_element()
            yield (
                f"{override}: the basic sweeper does not support interval(); give values, {key}=...,... or "
                f"{key}=range(...), or a sweeper such as hydra/sweeper=optuna"
            )


@contextmanager
def composing(folders: Sequence[Path], name: str = PRIMARY_CONFIG) -> Iterator[Callable[[list[str]], DictConfig]]:
    """Inside, a function that composes a config out of settings.

    Args:
        folders: of the yamls, in the order in which they are looked for; the last has those of the package.
        name: of the yaml to begin with.
    """
    *more, primary = folders
    searched = [f"hydra.searchpath=[{','.join(quoted(f'file://{path.absolute()}') for path in more)}]"] if more else []
    with hydra.initialize_config_dir(config_dir=str(primary.resolve()), version_base="1.3"):
        yield lambda settings: hydra.compose(name, [*settings, *searched])


def _raw_value(error: OmegaConfBaseException) -> str:
    """The value given to a setting of hydra itself, as the command line has it."""
    key = f"{error.full_key}="
    given = [argument.partition("=")[2] for argument in sys.argv if argument.lstrip("+").startswith(key)]
    return given[-1] if given else str(OmegaConf.to_container(error.parent_node, resolve=False))
