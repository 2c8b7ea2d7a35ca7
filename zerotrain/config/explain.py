"""Hydra's complaints about a command line, in one line each."""

from collections.abc import Callable, Iterator

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

from zerotrain.config.checks import OPEN_GROUPS, checked_config, must_be
from zerotrain.config.compose import first_line, known_keys
from zerotrain.config.suggest import did_you_mean
from zerotrain.errors import ConfigError

Compose = Callable[[list[str]], DictConfig]
"""Composes the config of one job from its overrides."""


def composition_problems(overrides: list[str], compose: Compose, *, is_sweep: bool) -> list[str]:
    """All that is wrong with a command line that Hydra refused, a line for each problem.

    Hydra stops at the first problem. This composes again without the override at fault until nothing else is wrong,
    and then checks the values. For a sweep, the first job that has problems speaks for all.
    """
    if not is_sweep:
        several = [override for override in overrides if len(_choices(override)) > 1]
        single = [override for override in overrides if override not in several]
        return [_several_values(override) for override in several] + _job_problems(single, compose)
    return next(filter(None, (_job_problems(job, compose) for job in _jobs(overrides))), [])


def _job_problems(overrides: list[str], compose: Compose) -> list[str]:
    remaining, refused = list(overrides), []
    while True:
        try:
            composed = compose(remaining)
            break
        except Exception as error:  # Hydra raises ValueError and KeyError too, and each stands for one wrong override
            at_fault = _override_at_fault(error, remaining, compose)
            refused.append((at_fault, error))
            if at_fault is None:
                return [_line(override, error, known_keys()) for override, error in refused]
            remaining.remove(at_fault)
    problems = [_line(override, error, known_keys(composed)) for override, error in refused]
    try:
        return problems + checked_config(composed)[1]
    except ConfigError as error:
        return [*problems, *error.problems]


def _line(override: str | None, error: Exception, known: list[str]) -> str:
    cause = error.__cause__ or error.__context__ or error
    if override is None:
        return " ".join(str(error).split("\n")[:2])
    key, _, got = override.lstrip("+~").partition("=")
    members = [name for name in known if name.startswith(f"{key}.")]
    if isinstance(error, OverrideParseException):
        return f"{override}: cannot be read; write key=value, such as zero.stage=3, special characters in quotes"
    if isinstance(error, MissingConfigException) and error.options:
        choices = ", ".join(error.options)
        return f"{override}: there is no such choice{did_you_mean(got, error.options)}; there are {choices}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        adding = f"; +{key}=... adds it" if key.startswith(OPEN_GROUPS) and key.count(".") > 1 else ""
        return f"{key}: there is no such setting{did_you_mean(key, known) or adding}"
    if "An item is already at" in str(error) or "Multiple values for" in str(error):
        return f"{override}: {key} has a value already; leave out the +"
    if override.startswith("~") and key in known:
        return f"{override}: {key} cannot be left out; give it another value"
    if isinstance(cause, ValidationError):
        group = f"{override}: {key} is a group of settings: {', '.join(members)}" if members else None
        return must_be(key, got) or group or f"{override}: {first_line(cause)}"
    return f"{override}: {first_line(error)}"


def _several_values(override: str) -> str:
    key, _, values = override.partition("=")
    return f"{override}: got several values; -m runs a job for each, {key}=[{values}] gives them as a list"


def _override_at_fault(error: Exception, overrides: list[str], compose: Compose) -> str | None:
    """The override that an exception of Hydra speaks of, or that alone raises the same."""
    if isinstance(error, OverrideParseException):
        return error.override
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        named_as = (override, f"'{key}'", f"for {key}.", f"'{key}/{value}'")
        if any(name in str(error) for name in named_as):
            return override
    return next((override for override in overrides if _refusal([override], compose) == str(error)), None)


def _refusal(overrides: list[str], compose: Compose) -> str | None:
    try:
        compose(overrides)
    except Exception as error:  # see above
        return str(error)
    return None


def _jobs(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of jobs of a sweep: enough of them to see each swept value once."""
    choices = [_choices(override) for override in overrides]
    first = [options[0] for options in choices]
    yield first
    for index, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:index], option, *first[index + 1 :]]


def _choices(override: str) -> list[str]:
    try:
        [parsed] = OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return [override]
    value = parsed.value()
    if isinstance(value, IntervalSweep):
        return [f"{parsed.get_key_element()}={value.start}"]
    if not parsed.is_discrete_sweep():
        return [override]
    return [f"{parsed.get_key_element()}={choice}" for choice in parsed.sweep_string_iterator()]
