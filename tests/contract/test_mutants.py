"""The faults of tests/mutants are still faults of this code: their texts are there, and so are their tests."""

import ast

import pytest

from tests.mutants.fault import REPOSITORY, Fault
from tests.mutants.faults import FAULTS


def problem_of(fault: Fault) -> str | None:
    try:
        ast.parse(fault.planted_in((REPOSITORY / "zerotrain" / fault.file).read_text()))
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    if fault.new == fault.old or not fault.why or not fault.tests:
        return "it changes nothing, or says not why, or names no test"
    for test in fault.tests:
        file, _, function = test.partition("::")
        if function and f"def {function}(" not in (REPOSITORY / "tests" / file).read_text():
            return f"there is no {test}"
    return None


def test_every_fault_can_be_planted_and_names_tests_that_are_there() -> None:
    assert len(FAULTS) > 100
    assert {name: problem for name, fault in FAULTS.items() if (problem := problem_of(fault))} == {}


def test_a_fault_whose_text_has_gone_or_is_there_twice_is_told() -> None:
    fault = next(iter(FAULTS.values()))
    for text in ("", 2 * fault.old):
        with pytest.raises(ValueError, match="times, not once"):
            fault.planted_in(text)
