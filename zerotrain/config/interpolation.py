"""Values that point elsewhere, such as ${data.vocab_size}: a line for each that leads nowhere."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_VARIABLE = re.compile(r"Environment variable '(.+?)' not found")
_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_RESOLVER = re.compile(r"Unsupported interpolation type (\S+)")


def interpolation_problems(node: Any, prefix: str = "") -> Iterator[str]:
    """One line for each value in a composed config that cannot be resolved."""
    if not isinstance(node, DictConfig | ListConfig):
        return
    names: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for name in names:
        key = f"{prefix}{name}"
        try:
            value = None if OmegaConf.is_missing(node, name) else node[name]
        except OmegaConfBaseException as error:
            unresolved_values: Any = OmegaConf.to_container(node, resolve=False)
            yield interpolation_line(key, unresolved_values[name], error)
        else:
            yield from interpolation_problems(value, f"{key}.")


def unresolved(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each text among plain values that OmegaConf would resolve."""
    return ((name, each) for name, each in nested(value, prefix) if isinstance(each, str) and "${" in each)


def nested(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of a plain value and of all that lies in it."""
    yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in items:
        yield from nested(each, f"{name}.{key}")


def interpolation_line(key: str, got: Any, error: Exception) -> str:
    """The problem of an interpolated value, and its remedy."""
    said = str(error)
    if variable := _VARIABLE.search(said):
        default = f"${{oc.env:{variable[1]},...}}"
        return f"{key}: got {got}; the environment variable {variable[1]} is not set; set it, or use {default}"
    if missing := _KEY.search(said):
        or_null = f", or {key}=null, which takes the number from the data" if key == "model.vocab_size" else ""
        return f"{key}: got {got}; there is no {missing[1]}; give {key}=...{or_null}"
    if resolver := _RESOLVER.search(said):
        return f"{key}: got {got}; there is no resolver {resolver[1]}; give {key}=...; write \\$ for the character $"
    if "Recursive interpolation" in said:
        return f"{key}: got {got}, which leads back to itself; give {key}=..."
    line = said.strip().split("\n")[0].rstrip(".")
    return f"{key}: got {got}; {line}; give {key}=..."


def quoted(text: str) -> str:
    """A value of a setting, as Hydra reads it: a quote is escaped, and a backslash where one ends the text or stands
    before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), text)
    return f"'{escaped}'"
