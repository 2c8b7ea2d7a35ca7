"""Which part may know which: an import only goes down the layers, and only comm talks to other ranks."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "zerotrain"
MAY_IMPORT = {
    "files": set(),
    "device": set(),
    "version": set(),
    "errors": set(),
    "settings": set(),
    "config": {"errors", "settings"},
    "comm": {"errors"},
    "checkpoint": {"errors"},
    "offload": {"errors"},
    "sharding": {"errors"},
    "engine": {"errors", "settings", "comm", "checkpoint", "offload", "sharding"},
    "api": {"errors", "settings", "comm", "sharding", "engine"},
    "models": set(),
    "data": set(),
    "training": {"errors", "comm", "checkpoint", "engine", "data"},
    "report": {"errors", "training"},
}
"""What each part of the package may import of it. Left out are `TOGETHER`, which put all together."""

FROM_EVERYWHERE = {"files", "device", "version"}
"""They import nothing of ours; the first no torch either."""

TOGETHER = {"commands", "preflight", "replay", "run", "saved", "launching"}

SPEAK_OF_ARGUMENTS = ("api.py", "comm", "checkpoint", "sharding", "engine")
"""Messages from here are read by users of `build_engine`, who have no config; `config/words.py` translates them."""
CONFIG_NAMES = re.compile(
    r"\b(train|launch)\.[a-z_]+|\bmodel\.(compile|activation)|\boptimizer\.[a-z]|=(true|false|null)\b"
)

MAY_TALK_TO_OTHER_RANKS = {"comm", "launching", "preflight"}
"""The collectives, the launcher's start of ranks, the wire to nobody of a plan."""

WRITES_ITS_FORMAT = {"commands"}
"""Folders of torch.distributed.checkpoint, in one process."""


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("zerotrain", cache_dir=None)


def test_the_import_contracts_of_the_project_file_are_kept():
    lint_imports = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    process = subprocess.run([*lint_imports, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert ", 0 broken" in process.stdout


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_it_is_built_on(part: str, imports: grimp.ImportGraph):
    name = f"zerotrain.{part}"
    members = {name, *imports.find_descendants(name)}
    imported = {found for member in members for found in imports.find_modules_directly_imported_by(member)}
    others = {found.split(".")[1] for found in imported - members}
    assert others <= MAY_IMPORT[part] | FROM_EVERYWHERE


def test_every_part_of_the_package_has_its_place():
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts == {*MAY_IMPORT, *TOGETHER, "__init__", "__main__"}


def test_only_these_parts_know_torch_distributed():
    knowing = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if imports_torch_distributed(path)}
    assert knowing == MAY_TALK_TO_OTHER_RANKS | WRITES_ITS_FORMAT


def imports_torch_distributed(path: Path) -> bool:
    """Whether a file imports torch.distributed or mentions it as an attribute of torch."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(name.startswith("torch.distributed") for name in names):
            return True
    return False


def test_what_an_engine_says_names_no_setting_that_only_the_config_has():
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] in SPEAK_OF_ARGUMENTS]
    texts = [(path.name, text) for path in paths for text in said_in(path)]
    assert [(name, text) for name, text in texts if CONFIG_NAMES.search(text)] == []


def said_in(path: Path) -> Iterator[str]:
    """The texts of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value
