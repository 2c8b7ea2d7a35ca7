"""Digests of tensors: parts add up, and one wrong element is found."""

import random

import pytest
import torch

from zerotrain.engine import verification
from zerotrain.engine.verification import digest, sum_of, wrong_element


def on_host(values: torch.Tensor, start: int = 0) -> tuple[int, int]:
    first, second = digest(values, start).tolist()
    return first, second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_one_wrong_element_is_found_wherever_it_lies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_CHUNK", 100)
    verification._places.cache_clear()
    draw = random.Random(0)
    values = (torch.randn(1234) * 50).to(dtype)
    right = on_host(values)
    for _ in range(50):
        element, bit = draw.randrange(1234), draw.randrange(8 * values.itemsize)
        wrong = values.clone()
        word = wrong[element : element + 1].view(torch.uint8)
        word[bit // 8] ^= 1 << bit % 8
        assert wrong_element(on_host(wrong), right, values.itemsize) == element
    verification._places.cache_clear()


def test_several_wrong_elements_are_seen_and_none_of_them_is_named() -> None:
    values = torch.randn(1000)
    wrong = values.clone()
    wrong[[3, 500, 731]] *= 1.5
    assert on_host(wrong) != on_host(values)
    assert wrong_element(on_host(wrong), on_host(values), 4) is None
    assert wrong_element(on_host(values), on_host(values), 4) is None


def test_zeros_of_another_sign_and_exchanged_elements_are_differences() -> None:
    values = torch.tensor([0.0, 1.0, 2.0])
    for other in (torch.tensor([-0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0, 1.0])):
        assert on_host(other) != on_host(values)


def test_digests_of_parts_at_their_places_add_up_to_that_of_the_whole() -> None:
    values = torch.randn(960).to(torch.bfloat16)
    parts = [on_host(values[start : start + 320], start) for start in (0, 320, 640)]
    assert sum_of(parts) == on_host(values)
