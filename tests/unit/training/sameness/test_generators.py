import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from zerotrain.training.sameness import generator_states, restore_generators, seed_leaf


class Draws(nn.Module):
    """Has a generator of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python = random.Random(2)
        self.of_numpy = np.random.default_rng(3)
        self.of_numpy_as_it_was = np.random.RandomState(4)
        self.with_arrays = np.random.Generator(np.random.MT19937(5))

    def draw(self) -> list[float]:
        return [
            torch.rand(1, generator=self.of_torch).item(),
            self.of_python.gauss(0, 1),
            self.of_numpy.standard_normal(),
            self.of_numpy_as_it_was.standard_normal(),
            self.with_arrays.standard_normal(),
        ]


@pytest.mark.case("stopping", "a module that draws from a generator of its own, from Python's or numpy's")
def test_generators_of_modules_go_on_from_where_they_were():
    model = nn.Sequential(Draws(), Draws())
    model[1].draw()
    states = json.loads(json.dumps(generator_states(model)))
    assert sorted(states)[0] == "0.of_numpy"
    assert len(states) == 10
    wanted = [each.draw() for each in model]
    fresh = nn.Sequential(Draws(), Draws())
    restore_generators(fresh, states)
    assert [each.draw() for each in fresh] == wanted


def test_a_model_without_generators_has_no_states_and_takes_none():
    model = nn.Linear(2, 2)
    assert generator_states(model) is None
    restore_generators(model, None)
    restore_generators(model, {"gone": [1]})


@pytest.mark.parametrize("draw", [torch.rand, random.random, np.random.rand], ids=["torch", "Python", "numpy"])
def test_what_a_model_draws_from_a_global_generator_depends_on_the_place_alone(draw):
    def drawn(*place: int) -> float:
        seed_leaf(*place)
        return float(draw() if draw is random.random else draw(1)[0])

    first = drawn(0, 3, 1, 0)
    assert drawn(0, 3, 1, 1) != first
    assert drawn(0, 3, 1, 0) == first
