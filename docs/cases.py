"""Writes the tables of reference/cases/ from the markers of the tests: `python docs/cases.py`.

    @pytest.mark.case("calls: Calls", "A step dropped with `engine.zero_grad()`", "same bits as without")
    def test_a_dropped_step_leaves_nothing() -> None: ...

The first argument is the page, and the section where it has several; then the case and its promise. Another test of the
same case leaves out the promise, and `@pytest.mark.case(*CASE)` repeats a constant of the module or of tests/cases.py.
`under="CASE"` puts a row below that of another case. `of=("NAME", ...)` on a module names cases of the module's table,
or parameters of its tests; of a longer table, CASE_ROWS is the page and lines of `case | promise | NAME; ...`, or `...
case` below the last one without dots. A test says when a page is out of date.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "docs/reference/cases"
SHARED = ast.parse((REPOSITORY / "tests/cases.py").read_text())
TABLE = re.compile(r"(?P<head>\| [^\n]*\n\|---[^\n]*\n)(?:\|[^\n]*\n)*")


@dataclass
class Case:
    """A row of a page."""

    topic: str
    case: str
    under: str | None
    place: tuple[str, int]
    """File and line of the marker that has the promise."""
    promise: str = ""
    tests: list[str] = field(default_factory=list)
    """Such as test_calls.py::test_a_dropped_step; those of the marker with the promise come first."""


@dataclass(frozen=True)
class Marker:
    """One `pytest.mark.case`."""

    place: tuple[str, int]
    tests: list[str]
    topic: str
    case: str
    promise: str | None = None
    under: str | None = None


class Constants(ast.NodeTransformer):
    """The values that a module, or tests/cases.py, gives names to, in place of the names."""

    def __init__(self, module: ast.Module) -> None:
        assigned = [node for node in (*SHARED.body, *module.body) if isinstance(node, ast.Assign)]
        self.by_name = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.visit(self.by_name[node.id]) if node.id in self.by_name else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        elements: list[ast.expr] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                elements += self.visit(element.value).elts
            else:
                elements.append(self.visit(element))
        return ast.Tuple(elements, ast.Load())

    def value(self, node: ast.expr) -> Any:
        """The literal that an expression stands for."""
        return ast.literal_eval(self.visit(node))


def markers_in(path: Path) -> Iterator[Marker]:
    """The markers on the tests of a file, and on the file itself."""
    text = path.read_text()
    if "mark.case(" not in text and "CASE_ROWS" not in text:
        return
    module = ast.parse(text)
    constants = Constants(module)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            marks, name = node.decorator_list, node.name
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks, name = node.value.elts if isinstance(node.value, ast.List) else [node.value], ""
        else:
            continue
        for mark in marks:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                named = {each.arg: constants.value(each.value) for each in mark.keywords if each.arg}
                of = named.pop("of", (name,))
                tests = [f"{path.name}::{each}" for each in of]
                given = constants.value(ast.Tuple(mark.args, ast.Load()))
                yield Marker((path.name, mark.lineno), tests, *given, **named)
    if rows := constants.by_name.get("CASE_ROWS"):
        topic, table = constants.value(rows)
        above = None
        for number, row in enumerate(table.strip().replace("\n    ", " ").splitlines()):
            case, promise, names = row.removeprefix("... ").split(" | ")
            above = above if row.startswith("... ") else case
            under = None if case == above else above
            tests = [f"{path.name}::{name}" for name in names.split("; ")]
            yield Marker((path.name, rows.lineno + number), tests, topic, case, promise, under)


def all_cases() -> list[Case]:
    """All rows: by the places of their tests, each below the case that it is under.

    Raises:
        ValueError: a case has no promise, or two, or is under one that is not there.
    """
    markers = sorted(
        (marker for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) for marker in markers_in(path)),
        key=lambda marker: (marker.promise is None, marker.place),
    )
    found: dict[tuple[str, str | None, str], Case] = {}
    for marker in markers:
        key = (marker.topic, marker.under, marker.case)
        if (marker.promise is None) == (key not in found):
            raise ValueError(f"{marker.place}: {marker.case!r} needs one marker with a promise, of the same page")
        case = found.setdefault(key, Case(marker.topic, marker.case, marker.under, marker.place, marker.promise or ""))
        case.tests += marker.tests
    places = {(case.topic, case.case): case.place for case in found.values() if case.under is None}
    if strays := [case.place for case in found.values() if case.under and (case.topic, case.under) not in places]:
        raise ValueError(f"under a case that is not there: {strays}")

    def order(case: Case) -> tuple[tuple[str, int], bool, tuple[str, int]]:
        return places[case.topic, case.under or case.case], case.under is not None, case.place

    return sorted(found.values(), key=order)


def page(path: Path, cases: list[Case]) -> str:
    """A page as it should be: the text around its tables is written by hand."""
    rows: dict[str, str] = {}
    for each in cases:
        shown = ", ".join(f"`{test}`" for test in dict.fromkeys(each.tests))
        row = f"| {'... ' if each.under else ''}{each.case} | {each.promise} | {shown} |\n"
        rows[each.topic] = rows.get(each.topic, "") + row
    parts = re.split(r"(?m)^## (.*)\n", path.read_text())
    text = parts[0]
    for title, body in zip(["", *parts[1::2]], [parts[0], *parts[2::2]], strict=True):
        topic = f"{path.stem}: {title}" if title else path.stem
        made = TABLE.sub(lambda table, topic=topic: table["head"] + rows.pop(topic, ""), body)
        text = made if not title else f"{text}## {title}\n{made}"
    if left := [topic for topic in rows if topic.partition(":")[0] == path.stem]:
        raise ValueError(f"{path.name} has no table for {left}")
    return text


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    cases = all_cases()
    return {path: page(path, cases) for path in sorted(PAGES.glob("*.md")) if path.stem != "README"}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
