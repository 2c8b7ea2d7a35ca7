"""Hydra's complaints about a command line, in one line each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, errors

from zerotrain.config.checks import CALLBACKS, OPEN_GROUPS, checked_config, must_be, without_arguments
from zerotrain.config.compose import first_paragraph, known_keys
from zerotrain.config.words import REMOVED, did_you_mean, we_call_it
from zerotrain.errors import ConfigError

# The place of a setting in a yaml: the file and the line, for values not given on the command line.


@dataclass(frozen=True)
class SettingPlace:
    """The place where a yaml sets a key, and the value there."""

    path: Path
    line: int
    value: str
    """As it is written; empty where it is no single value."""

    def __str__(self) -> str:
        is_inside = self.path.is_relative_to(Path.cwd())
        return f"{self.path.relative_to(Path.cwd()) if is_inside else self.path}, line {self.line}"


def with_place(problem: str, choices: Mapping[str, Any], folders: Sequence[Path], overrides: Sequence[str]) -> str:
    """A line about a setting, with the chosen yaml of its value; as it is where the command line has the value.

    Args:
        choices: which yaml was chosen of each group.
        overrides: those of the command line.
    """
    key = problem.partition(":")[0].lstrip("+")
    names = [override.lstrip("+").partition("=")[0] for override in overrides]
    if any(key == name or ("." in name and key.startswith(f"{name}.")) for name in names):
        return problem
    found = (
        (group, find_yaml(f"{group}/{choice}", folders)) for group, choice in choices.items() if choice is not None
    )
    files = [(group, path, path.read_text(encoding="utf-8").lstrip()) for group, path in found if path is not None]
    # An experiment counts more than the group it changes, and that more than others.
    files.sort(key=lambda file: (not file[2].startswith("# @package _global_"), file[0] != key.partition(".")[0]))
    places = (place_of(key, path) for _, path, _ in files)
    place = next((place for place in places if place is not None), None)
    return problem if place is None else f"{problem} ({place})"


def find_yaml(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a config such as `experiment/mine`; None where no folder has it."""
    paths = (folder / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def place_of(key: str, path: Path) -> SettingPlace | None:
    """The place where a yaml sets a dotted key, named from its top or from that of a group it lies in; None if it does
    not."""
    places: dict[str, SettingPlace] = {}

    def note(node: yaml.Node | None, prefix: str) -> None:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            text = value.value if isinstance(value, yaml.ScalarNode) else ""
            places[f"{prefix}{name.value}"] = SettingPlace(path, name.start_mark.line + 1, text)
            note(value, f"{prefix}{name.value}.")

    with suppress(yaml.YAMLError, OSError, UnicodeError):
        note(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), "")
    while key not in places and "." in key:
        key = key.partition(".")[2]
    return places.get(key)


Compose = Callable[[list[str]], DictConfig]
"""Composes the config of one job from its overrides."""


_PLUGINS = {
    "hydra/launcher": ("joblib", "ray", "rq", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("ax", "nevergrad"),
}
"""Choices from packages of their own, such as hydra-ray-launcher."""
_OF_EXTRA = ("joblib", "submitit_local", "submitit_slurm")
"""Choices of an extra of ours: it also names compatible versions of packages."""


def composition_problems(
    overrides: list[str], compose: Compose, *, is_sweep: bool, folders: Sequence[Path] = ()
) -> list[str]:
    """All problems of a command line refused by Hydra, a line for each.

    Hydra stops at the first problem. This composes again without the override at fault until nothing else is wrong,
    and then checks the values. For a sweep, the first job with problems speaks for all.

    Args:
        folders: where the yamls of the groups lie, in the order in which they are looked for.
    """
    if is_sweep:
        # Enough jobs to see each swept value once.
        choices = [options for options in map(_choices, overrides) if options]
        base = [options[0] for options in choices]
        problems = _job_problems(base, compose, folders)
        for index, options in enumerate(choices):
            for option in options[1:]:
                problems = problems or _job_problems([*base[:index], option, *base[index + 1 :]], compose, folders)
        return problems
    problems = []
    several = [override for override in overrides if len(_choices(override)) != 1]
    for override in several:
        key, _, values = override.partition("=")
        as_list = "" if "(" in values else f", {key}=[{values}] gives them as a list"
        problems.append(f"{override}: got several values; -m runs a job for each{as_list}")
    return problems + _job_problems([override for override in overrides if override not in several], compose, folders)


def interval_problems(overrides: Sequence[str]) -> list[str]:
    """A line for each interval on a command line whose sweeper takes none."""
    problems = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        interval = override.value()
        if isinstance(interval, IntervalSweep):
            ends = f"{override.get_key_element()}={interval.start:g},{interval.end:g}"
            problems.append(
                f"{override.input_line}: only hydra/sweeper=optuna chooses from an interval; add it, or list values, "
                f"such as {ends}"
            )
    return problems


def _job_problems(overrides: list[str], compose: Compose, folders: Sequence[Path]) -> list[str]:
    remaining, refused = list(overrides), []
    while True:
        try:
            composed = compose(remaining)
            break
        except Exception as error:  # Hydra raises ValueError and KeyError too, and each stands for one wrong override
            at_fault = _override_at_fault(error, remaining, compose)
            refused.append((at_fault, error))
            if at_fault is None:
                return [_line(override, error, known_keys(), folders) for override, error in refused]
            remaining.remove(at_fault)
            if isinstance(error, MissingConfigException):  # which settings it has, nobody knows
                group = at_fault.lstrip("+").partition("=")[0].replace("/", ".")
                remaining = [item for item in remaining if not item.lstrip("+~").startswith(f"{group}.")]
    problems = [_line(override, error, known_keys(composed), folders) for override, error in refused]
    try:
        return problems + checked_config(composed)[1]
    except ConfigError as error:
        return [*problems, *error.problems]


def _line(override: str | None, error: Exception, keys: list[str], folders: Sequence[Path]) -> str:
    cause: Any = error.__cause__ or error.__context__ or error
    if override is None:
        return first_paragraph(error)
    key, _, got = override.lstrip("+~").partition("=")
    members = [name for name in keys if name.startswith(f"{key}.")]
    if isinstance(error, OverrideParseException) or not key:
        unreadable = f"{override or repr('')}: cannot be read"
        if isinstance(error.__cause__, TypeError | ValueError):  # of a function of Hydra's, such as choice(...)
            return f"{unreadable}: {first_paragraph(error.__cause__)}"
        return (
            f"{unreadable}; write key=value, such as zero.stage=3; special characters need quotes inside the shell's "
            "quotes, such as 'data.path=\"a (b)\"'"
        )
    if isinstance(error, MissingConfigException):
        return _missing_choice(override, error, folders)
    group = key.partition("@")[0]
    path = find_yaml(f"{group}/{got}", folders)
    if path is not None and isinstance(error, ConfigCompositionException):
        return _line_of_file(path, group, override, cause, keys)
    if isinstance(cause, errors.GrammarParseError):
        return f"{override}: ${{ begins a reference and needs a }} to close it; write \\${{ for the characters ${{"
    key, got = _innermost(override, cause) or (key, got)
    if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError):
        outer = override.partition("=")[0]
        if must_be(outer, got) is not None:  # a dict, which Hydra merges into one that is there, but for new names
            return (
                f"{outer}: has a value already, and the two would be merged; {outer}=null before it removes that value"
            )
        may_be_added = key.startswith(tuple(f"{group}." for group in (*OPEN_GROUPS, CALLBACKS)))
        adding = f"; +{key}=... adds it" if may_be_added else ""
        is_own = key.startswith((f"{CALLBACKS}.", "optimizer.groups."))  # whose names are the user's
        meant = "" if is_own else we_call_it(key, got) or did_you_mean(key, keys)
        return f"{key}: there is no such setting{_callback_hint(key, keys, folders) or meant or adding}"
    if override.startswith("~") and key in keys and key.partition(".")[0] in OPEN_GROUPS:
        advice = without_arguments(key.partition(".")[0])
        return f"{override}: is null, and Hydra can only leave out a setting with a value; {advice}"
    if isinstance(cause, errors.ValidationError):
        all_of_it = f"{override}: {key} is a group of settings: {', '.join(members)}" if members else None
        return must_be(key, got) or all_of_it or f"{override}: {first_paragraph(cause)}"
    if key.startswith("hydra/sweeper/"):
        return f"{override}: needs hydra/sweeper=optuna too"
    return f"{override}: {first_paragraph(cause if isinstance(cause, errors.OmegaConfBaseException) else error)}"


def _missing_choice(override: str, error: MissingConfigException, folders: Sequence[Path]) -> str:
    """The message for a missing choice, of the command line or of a chosen yaml."""
    key, _, got = override.lstrip("+~").partition("=")
    config_name = error.missing_cfg_file or ""
    options = list(error.options or ())
    if not options and (group := config_name.rpartition("/")[0]):  # Hydra names none for a list
        options = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    choices = f"; there are {', '.join(options)}" if options else ""
    is_missing = config_name in ("", f"{key}/{got}", got)
    if is_missing and got in _PLUGINS.get(key, ()):
        of_hydra = f"hydra-{got.partition('_')[0]}-{key.removeprefix('hydra/')}"
        package = "'zerotrain[sweeps]'" if got in _OF_EXTRA else of_hydra
        return f"{override}: is not installed; pip install {package}{choices}"
    name = config_name.rpartition("/")[2] or got
    meant = we_call_it(key, got) or did_you_mean(name, options)
    if f"{key}={name}" in REMOVED:
        meant = f"; {REMOVED[f'{key}={name}']}"
    if not meant and (group := _find_group(name, folders)):
        meant = f"; did you mean {group}={name}?"
    if is_missing:
        return f"{override}: there is no such choice{meant}{choices}"
    return f"{override}: needs {config_name}, which does not exist{meant}{choices}"


def _find_group(choice: str, folders: Sequence[Path]) -> str:
    """The group with a choice of this name; empty where there is none."""
    groups = (path.parent.name for folder in folders for path in folder.glob("*/*.yaml") if path.stem == choice)
    return min(groups, default="")


def _callback_hint(key: str, keys: list[str], folders: Sequence[Path]) -> str:
    """The advice to choose a callback, for a setting of a callback missing in the run."""
    outer, name, *_ = f"{key}.".split(".")
    is_there = any(item.startswith(f"{outer}.{name}.") for item in keys)
    group = "" if is_there or outer != CALLBACKS else _find_group(name, folders)
    return f"; {group}={name} brings that callback" if group else ""


def _line_of_file(path: Path, group: str, override: str, cause: Exception, keys: list[str]) -> str:
    """The problem of a chosen yaml, with its line."""
    key = str(getattr(cause, "full_key", "") or "")
    place = place_of(key, path)
    where = place or override
    if place is None and key == group:
        return f"{path}: its settings go to {key}, which does not exist; its first line must be `# @package _global_`"
    if not key:
        return f"{path}: {first_paragraph(cause).lstrip(': ')}"
    if isinstance(cause, errors.ConfigAttributeError | errors.ConfigKeyError):
        return f"{where}: {key}: there is no such setting{we_call_it(key) or did_you_mean(key, keys)}"
    return f"{where}: {must_be(key, place.value) if place and place.value else f'{key}: {first_paragraph(cause)}'}"


def _innermost(override: str, cause: BaseException) -> tuple[str, str] | None:
    """(key, value) of the exception's setting, inside the {...} of an override."""
    [parsed] = OverridesParser.create().parse_overrides([override])
    key, value = parsed.key_or_group, parsed.value()
    inner = str(getattr(cause, "full_key", ""))
    if not isinstance(value, dict) or not inner.startswith(f"{key}."):
        return None
    for part in inner.removeprefix(f"{key}.").split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return inner, str(value)


def _override_at_fault(error: Exception, overrides: list[str], compose: Compose) -> str | None:
    """The override named in an exception of Hydra, or else the one with the same exception when alone."""
    if isinstance(error, OverrideParseException):
        return error.override
    missing = getattr(error, "missing_cfg_file", None)  # a yaml beside it may be named too
    for override in sorted(overrides, key=lambda item: item.lstrip("+~").replace("=", "/", 1) != missing):
        key, _, value = override.lstrip("+~").partition("=")
        if any(name in str(error) for name in (override, f"'{key}'", f"for {key}.", f"'{key}/{value}'")):
            return override
    if _refusal([], compose) == str(error):  # so do the yamls alone
        return None
    return next((override for override in overrides if _refusal([override], compose) == str(error)), None)


def _refusal(overrides: list[str], compose: Compose) -> str | None:
    try:
        compose(overrides)
    except Exception as error:  # see above
        return str(error)
    return None


def _choices(override: str) -> list[str]:
    """The override with each of its values; of an interval with its start, and none of a glob."""
    try:
        [parsed] = OverridesParser.create().parse_overrides([override])
    except HydraException:
        return [override]
    key, value = parsed.get_key_element(), parsed.value()
    if isinstance(value, Glob):
        return []
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}"]
    if not parsed.is_discrete_sweep():
        return [override]
    try:
        return [f"{key}={choice}" for choice in parsed.sweep_string_iterator()]
    except (ValueError, TypeError) as error:  # such as range(1,2,0)
        raise ConfigError(f"{override}: {first_paragraph(error)}") from error
