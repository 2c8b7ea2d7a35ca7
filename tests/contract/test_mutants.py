"""The faults of tests/mutants are still faults of this code: their functions are there, and so are their tests."""

import ast

import pytest

from tests.mutants.changes import Always, Change, Drop, Swap
from tests.mutants.fault import REPOSITORY, Fault
from tests.mutants.faults import FAULTS, ROOMS


def problem_of(fault: Fault) -> str | None:
    try:
        text = (REPOSITORY / "zerotrain" / fault.file).read_text()
        compile(fault.planted_in(text), fault.file, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    if not fault.why or not fault.tests:
        return "it says not why, or names no test"
    for test in fault.tests.split():
        file, _, function = test.partition("::")
        if function and f"def {function}(" not in (REPOSITORY / "tests" / file).read_text():
            return f"there is no {test}"
    return None


def test_every_fault_can_be_planted_and_names_tests_that_are_there() -> None:
    assert len(FAULTS) == sum(len(room.FAULTS) for room in ROOMS) > 100
    assert {name: problem for name, fault in FAULTS.items() if (problem := problem_of(fault))} == {}


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (Drop("wait"), "self.a.wait(1)\nrest()", "rest()"),
        (Drop("a", nth=1), "self.a = 1\nself.a = 2", "self.a = 1"),
        (Drop("raise"), "if a:\n    raise ValueError(a)", "if a:\n    pass"),
        (Always(False), "if a:\n    rest()", "if False:\n    rest()"),
        (Always(True, "b"), "x = [c if b else d for a in e if a]", "x = [c if True else d for a in e if a]"),
        (Swap("<=", "<"), "x = a <= b", "x = a < b"),
        (Swap("f(a, 1)", "0"), "x = f(\n    a,\n    1,\n)", "x = 0"),
        (Swap("a", "b"), "f(a, a)", None),
        (Swap("a", "a"), "f(a)", None),
    ],
    ids=str,
)
def test_a_change_has_one_place_or_is_refused(change: Change, before: str, after: str | None) -> None:
    fault = Fault("Room.end", change, "why", "unit/test_errors.py")
    head = "import os  # stays\n\n\nclass Room:\n    @property\n    def end(self):\n"
    text = head + "\n".join(f"        {line}" for line in before.splitlines()) + "\n\n    # stays\n    b = 1\n"
    if after is None:
        with pytest.raises(ValueError, match=r"fits|no such|changes nothing"):
            fault.planted_in(text)
        return
    planted = fault.planted_in(text)
    assert planted.startswith(head)
    assert planted.endswith("\n\n    # stays\n    b = 1\n")
    (_, room) = ast.parse(planted).body
    assert ast.unparse(room.body[0].body) == after  # type: ignore[attr-defined]
