"""Writes reference/settings.md and reference/choices.md from the code and conf/: `python docs/settings.py`. A test says
when a page is old."""

import ast
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from zerotrain.config import schema
from zerotrain.settings import Setting

REPOSITORY = Path(__file__).resolve().parents[1]
REFERENCE = REPOSITORY / "docs/reference"
OTHER_YAMLS = ("debug", "experiment", "precision")
"""Folders of conf/ whose yamls choose no class."""
HEAD = """# Which settings are there, and what does each mean?

`python docs/settings.py` writes this page from the code. Do not edit it. `python launch.py --cfg job` prints a run's
settings. They go on the command line (`zero.stage=3`) or into a yaml; `null` is none. One without an effect in a run
gets a warning. Models, data, optimizers, schedules, callbacks, metrics and loggers are [choices](choices.md).
"""
HEAD_OF_TABLE = "| setting | default | it must be | meaning |\n|---|---|---|---|"
HEAD_OF_CHOICES = """# Which models, data, optimizers, schedules, callbacks, metrics and loggers can I choose?

`python docs/settings.py` writes this page from `conf/`. Do not edit it. A choice (`data=tokens`) names a class with
`_target_`; its other keys are the arguments, such as `data.path`. All else are [settings](settings.md).

| choice | meaning | arguments and defaults |
|---|---|---|"""


def docstrings_of(path: Path) -> dict[tuple[str, str], str]:
    """(class, field) -> the string below the field, on one line."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return found


def cell(text: str) -> str:
    """A text that may stand in a table."""
    return text.replace("|", "\\|")


def shown(value: Any) -> str:
    """A value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def rows_of(group: str, config: type, meanings: dict[tuple[str, str], str]) -> list[str]:
    """A row for each setting of a dataclass and of what it inherits."""
    rows = []
    for each in fields(config):
        found = each.metadata.get("setting")
        assert isinstance(found, Setting)
        meaning = next(
            meanings[base.__name__, each.name] for base in config.__mro__ if (base.__name__, each.name) in meanings
        )
        rows.append(
            f"| `{group}.{each.name}` | `{shown(found.default)}` | {cell(found.rule.allowed)} | {cell(meaning)} |"
        )
    return rows


def choice(group: str, name: str) -> str:
    """A row for a yaml of an open group: its first line, and its keys with their comments."""
    text = (REPOSITORY / "conf" / group / f"{name}.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    meaning = lines[0].removeprefix("# ") if lines[0].startswith("#") else ""
    keys = []
    for line in lines:
        key = re.fullmatch(r"( *)(\w+):(?: ([^#]*[^# ]))?(?: +# (.*))?", line)
        if key and key[2] not in ("_target_", "_partial_", "defaults"):
            keys.append(f"`{key[2]}{'=' + key[3] if key[3] else ''}`{': ' + key[4] if key[4] else ''}")
    return f"| `{group}={name}` | {cell(meaning)} | {cell('; '.join(keys))} |"


def groups() -> dict[str, type]:
    """Each group of a run's config with the dataclass that has its settings."""
    made = {each.name: each.default_factory for each in fields(schema.Config)}
    return {
        name: made_by for name, made_by in made.items() if isinstance(made_by, type) and is_dataclass(made_by)
    } | schema.SWITCHES


def settings_page() -> str:
    """The page of the settings as it should be."""
    meanings = docstrings_of(REPOSITORY / "zerotrain/settings.py") | docstrings_of(
        REPOSITORY / "zerotrain/config/schema.py"
    )
    seed = next(each for each in fields(schema.Config) if each.name == "seed").metadata["setting"]
    parts = [HEAD + f"`seed` (default `{seed.default}`, {seed.rule.allowed}): {meanings['Config', 'seed']}\n"]
    for group, config in groups().items():
        if group in schema.SWITCHES:
            continue
        title = " ".join(re.split(r"\.(?:\s|$)", config.__mro__[-2].__doc__ or "")[0].split())
        parts.append(f"## `{group}`: {title}\n\n{HEAD_OF_TABLE}")
        parts.append("\n".join(rows_of(group, config, meanings)) + "\n")
    parts.append(f"## Of every model, loss, dataset and optimizer, also of your own\n\n{HEAD_OF_TABLE}")
    parts += [row for group, config in schema.SWITCHES.items() for row in rows_of(group, config, meanings)]
    return "\n".join(parts) + "\n"


def choices_page() -> str:
    """The page of the choices as it should be."""
    yamls = sorted(path for path in (REPOSITORY / "conf").glob("*/*.yaml") if path.parent.name not in OTHER_YAMLS)
    return "\n".join([HEAD_OF_CHOICES, *(choice(path.parent.name, path.stem) for path in yamls)]) + "\n"


def pages() -> dict[Path, str]:
    """Each page with its text."""
    return {REFERENCE / "settings.md": settings_page(), REFERENCE / "choices.md": choices_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
