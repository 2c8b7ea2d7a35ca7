import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from zerotrain.training.sameness import choose_kernels, generator_states, restore_generators, seed_leaf

# What a run sets for torch's kernels; what they compute then, tests/distributed/test_gpu.py looks at.


PLACES = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
)


@pytest.fixture(autouse=True)
def settings_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that torch has, again behind the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = [getattr(of, name) for of, name in PLACES]
    for of, name in PLACES:
        setattr(of, name, False)
    yield
    for (of, name), value in zip(PLACES, before, strict=True):
        setattr(of, name, value)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("tf32", "deterministic"), [(False, False), (True, False), (True, True)])
def test_matrices_are_multiplied_in_tf32_where_a_run_says_so_and_is_not_deterministic(tf32, deterministic) -> None:
    choose_kernels(deterministic=deterministic, tf32=tf32)
    in_tf32 = tf32 and not deterministic
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (in_tf32, in_tf32)
    assert torch.are_deterministic_algorithms_enabled() is deterministic


class Draws(nn.Module):
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


@pytest.mark.parametrize("draw", [torch.rand, random.random, np.random.rand], ids=["torch", "Python", "numpy"])
def test_what_a_model_draws_from_a_global_generator_depends_on_the_place_alone(draw):
    def drawn(*place: int) -> float:
        seed_leaf(*place)
        return float(draw() if draw is random.random else draw(1)[0])

    first = drawn(0, 3, 1, 0)
    assert drawn(0, 3, 1, 1) != first
    assert drawn(0, 3, 1, 0) == first
