"""The faults of tests/mutants are still faults of this code: their texts are there, and so are their tests."""

import ast

import pytest

from tests.mutants.fault import REPOSITORY
from tests.mutants.faults import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted_and_names_tests_that_are_there(name: str) -> None:
    fault = FAULTS[name]
    planted = fault.planted_in((REPOSITORY / "zerotrain" / fault.file).read_text())
    ast.parse(planted)
    assert fault.new != fault.old
    assert fault.why
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text()
        assert not function or f"def {function}(" in text


def test_a_fault_whose_text_has_gone_or_is_there_twice_is_told() -> None:
    fault = next(iter(FAULTS.values()))
    for text in ("", 2 * fault.old):
        with pytest.raises(ValueError, match="times, not once"):
            fault.planted_in(text)
