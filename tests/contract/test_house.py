"""The house keeps its shape: few and full files, names that say something, and a budget of lines for each wing.

A limit goes down with the code and never up: what goes over it folds something away.
"""

import ast
from pathlib import Path

import pytest

from tests.contract.house import LIMITS, LOWER_LIMITS, Module, measure_house


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


TEXT = '''"""A docstring."""

import os
from math import (
    inf,
    pi,
)


class Rank:
    """A docstring
    of two lines."""

    size: int = 1  # a comment behind code

    def _twice(self, given):
        # a comment
        return 2 * given


def shown(rank, is_late):
    return ["late"] * is_late + [rank._twice(each) for each in (pi, inf)] + ["s" * (rank.size > 1), os.sep * 2]
'''


def test_what_is_counted():
    module = Module(Path("comm/ranks.py"), TEXT, ast.parse(TEXT))
    assert module.wing == "engine"
    assert module.num_code_lines == 11
    assert module.num_import_lines == 5
    assert sorted(module.names()) == ["each", "given", "is_late", "rank", "self", "size"]
    assert list(module.helpers()) == ["comm/ranks.py:16 _twice"]
    assert list(module.products()) == ["comm/ranks.py:22", "comm/ranks.py:22"]
