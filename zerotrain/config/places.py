"""The place of a setting in a yaml: the file and the line, for values not given on the command line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class SettingPlace:
    """The place where a yaml sets a key, and the value there."""

    path: Path
    line: int
    value: str
    """As it is written; empty where it is no single value."""

    def __str__(self) -> str:
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return f"{path}, line {self.line}"


def with_place(problem: str, choices: Mapping[str, Any], folders: Sequence[Path], given: Sequence[str]) -> str:
    """A line about a setting, with the yaml that sets it where a chosen one does and the command line does not.

    Args:
        choices: which yaml was chosen of each group.
        given: the overrides of the command line.
    """
    key = problem.partition(":")[0].lstrip("+")
    names = [override.lstrip("+").partition("=")[0] for override in given]
    if any(key == name or ("." in name and key.startswith(f"{name}.")) for name in names):
        return problem
    found = (find_yaml(f"{group}/{choice}", folders) for group, choice in choices.items() if choice is not None)
    # An experiment counts more than the group it changes.
    files = [(path, path.read_text(encoding="utf-8").lstrip()) for path in found if path is not None]
    files.sort(key=lambda each: not each[1].startswith("# @package _global_"))
    places = (place_of(key, path) for path, _ in files)
    place = next((place for place in places if place is not None), None)
    return problem if place is None else f"{problem} ({place})"


def find_yaml(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a config such as `experiment/mine`; None where no folder has it."""
    paths = (folder / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def place_of(key: str, path: Path) -> SettingPlace | None:
    """The place where a yaml sets a dotted key, named from its top or from that of a group it lies in; None if it does
    not."""
    root = _read(path)
    parts = key.split(".")
    places = (_find(parts[start:], root, path) for start in range(len(parts)))
    return next((place for place in places if place is not None), None)


def holds_no_settings(path: Path) -> bool:
    """Whether a yaml holds something else than `key: value`."""
    root = _read(path)
    return root is not None and not isinstance(root, yaml.MappingNode)


def syntax_problem(error: yaml.MarkedYAMLError) -> str:
    """The line for a file that is no yaml."""
    mark = error.problem_mark or error.context_mark
    where = f"{mark.name}, line {mark.line + 1}: " if mark else ""
    return f"{where}{error.problem or error.context}"


def _read(path: Path) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        return root
    except (yaml.YAMLError, OSError, UnicodeError):
        return None


def _find(parts: list[str], node: yaml.Node | None, path: Path) -> SettingPlace | None:
    place = None
    for part in parts:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name, value) for name, value in pairs if name.value == part), None)
        if found is None:
            return None
        name, node = found
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        place = SettingPlace(path, name.start_mark.line + 1, text)
    return place
