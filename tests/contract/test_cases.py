"""Every row of docs/cases.md names a test that is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = [line for line in (REPOSITORY / "docs" / "cases.md").read_text().splitlines() if line.startswith("| ")]
ROWS = [line for line in ROWS if not line.startswith("| case |")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_or_a_case_of_a_table_that_exists(row: str) -> None:
    case, promise, named = (cell.strip() for cell in row.strip("|").split("|"))
    assert case
    assert promise
    named_test = re.fullmatch(r"`(test_\w+\.py)::(.+)`", named)
    assert named_test is not None
    file, name = named_test.groups()
    (text,) = (path.read_text() for path in (REPOSITORY / "tests").rglob(file))
    assert f"def {name}(" in text or f'"{name}": ' in text


def test_every_case_of_the_parameters_has_a_row() -> None:
    source = (REPOSITORY / "tests" / "distributed" / "test_parameters.py").read_text()
    table = source[source.index("\nCASES = {") : source.index('"""By name, as docs/cases.md lists them."""')]
    cases = re.findall(r'^    "(.+)": Case\(', table, re.MULTILINE)
    assert len(cases) > 10
    assert [case for case in cases if not any(f"::{case}`" in row for row in ROWS)] == []
