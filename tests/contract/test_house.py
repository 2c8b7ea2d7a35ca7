"""The house keeps its shape: few and full files, names that say something, and a budget of lines for each wing.

A limit goes down with the code and never up: what goes over it folds something away.
"""

import pytest

from tests.contract.house import LIMITS, LOWER_LIMITS, measure_house


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return measure_house()


def test_every_figure_has_a_limit(figures: dict[str, float]):
    assert figures.keys() == LIMITS.keys() | LOWER_LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_is_within_its_limit(name: str, figures: dict[str, float]):
    assert figures[name] <= LIMITS[name], "python -m tests.contract.house shows the places"


@pytest.mark.parametrize("name", LOWER_LIMITS)
def test_a_figure_reaches_its_lower_limit(name: str, figures: dict[str, float]):
    assert figures[name] >= LOWER_LIMITS[name]
