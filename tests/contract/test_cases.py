"""The tables of docs/reference/cases are those of the markers. Rows name tests that exist, and each case of a table of
tests has a row."""

import ast
import functools
import re
from pathlib import Path

import pytest

from docs import cases

REPOSITORY = Path(__file__).resolve().parents[2]
TABLES = {
    "test_parameters.py": ("distributed/test_parameters.py", ["CASES"]),
    "test_calls.py": ("distributed/calls.py", ["CALLS"]),
    "test_kinds.py": ("bits/test_kinds.py", ["KINDS"]),
    "test_what_breaks_it.py": ("bits/test_what_breaks_it.py", ["SETTINGS", "MODELS"]),
}
"""Test file -> the file and names of its tables of cases."""
REFERENCE = REPOSITORY / "docs/reference"
PAGES = [path for path in sorted(REFERENCE.glob("cases/*.md")) if path.stem != "README"] + [REFERENCE / "bits.md"]
LINES = [line for path in PAGES for line in path.read_text().splitlines()]
HEADS = ("| case |", "| what I do |", "| may change |", "| must stay equal |")
ROWS = [line for line in LINES if line.startswith("| ") and not line.startswith(HEADS)]


def named_in(row: str) -> list[tuple[str, str]]:
    """(test file, test or case) of each test that a row names."""
    return re.findall(r"`(test_\w+\.py)::([^`]+)`", row.strip("|").split("|")[-1])


@functools.cache
def cases_of(test_file: str) -> set[str]:
    """The names of the cases in a test's table."""
    if test_file not in TABLES:
        return set()
    file, tables = TABLES[test_file]
    found: dict[str, set[str]] = {}
    for node in ast.parse((REPOSITORY / "tests" / file).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (target.id for target in targets if isinstance(target, ast.Name) and target.id in tables):
            assert isinstance(node.value, ast.Dict)
            found[name] = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert found.keys() == set(tables)
    return set().union(*found.values())


@functools.cache
def text_of(test_file: str) -> str:
    return "".join(path.read_text() for path in (REPOSITORY / "tests").rglob(test_file))


def missing_in(row: str) -> list[str]:
    """What a row should have, and names that are nowhere."""
    case, promise, _ = (cell.strip() for cell in row.strip("|").split("|"))
    parts = {"case": case, "promise": promise, "test": named_in(row)}
    missing = [name for name, part in parts.items() if not part]
    for file, name in named_in(row):
        is_there = f"def {name}(" in text_of(file) or f'"{name}"' in text_of(file) or name in cases_of(file)
        missing += [] if is_there else [f"{file}::{name}"]
    return missing


def test_each_row_names_a_test_or_a_case_of_a_table_that_exists() -> None:
    assert len(ROWS) > 300
    assert {row: missing for row in ROWS if (missing := missing_in(row))} == {}


@pytest.mark.parametrize("test_file", TABLES)
def test_every_case_of_a_table_has_a_row(test_file: str) -> None:
    cases = cases_of(test_file)
    assert len(cases) > 10
    named = {name for row in ROWS for file, name in named_in(row) if file == test_file}
    assert cases - named == set()


def test_the_tables_are_those_of_the_markers() -> None:
    for path, text in cases.pages().items():
        assert path.read_text() == text, "run: python docs/cases.py"
