"""Data that differs has another fingerprint, and equal data the same, whatever the items are."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerotrain.data import SyntheticTokens
from zerotrain.data.reading.fetch import RowError
from zerotrain.data.reading.fingerprint import fingerprint_of


class Items:
    def __init__(self, item: Callable[[int], Any], size: int = 9) -> None:
        self.item, self.size = item, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        return self.item(row)


def of(item: Callable[[int], Any], size: int = 9) -> dict[str, Any]:
    return fingerprint_of(SimpleNamespace(train=Items(item, size), validation=Items(item)))


@dataclass
class Fields:
    ids: torch.Tensor
    name: str


KINDS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda row: (torch.tensor([row, 2.5]), torch.tensor(row)),
    "half precision": lambda row: torch.tensor([row], dtype=torch.bfloat16),
    "not contiguous": lambda row: torch.arange(6).view(2, 3).T + row,
    "arrays": lambda row: {"ids": np.arange(3) + row, "label": np.int64(row)},
    "texts and numbers": lambda row: ["text", str(row), 1.5, None, True],
    "a dataclass": lambda row: Fields(torch.zeros(2, 0), str(row)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_any_kind_are_told_apart(kind: str) -> None:
    item = KINDS[kind]
    known = of(item)
    assert known == of(item)
    assert list(known) == ["rows", "validation_rows", "items_of_train", "items_of_validation"]
    for changed in (0, 4, 8):
        other = of(lambda row, changed=changed: item(99 if row == changed else row))  # type: ignore[misc]
        assert [name for name in known if known[name] != other[name]] == list(known)[2:]
    assert known["rows"] != of(item, size=10)["rows"]


def test_what_is_drawn_for_an_item_is_the_same_on_all_ranks() -> None:
    torch.manual_seed(1)
    known = of(lambda row: torch.rand(3))
    torch.manual_seed(2)
    assert of(lambda row: torch.rand(3)) == known


def test_items_that_are_never_the_same_are_not_compared() -> None:
    generator = np.random.default_rng()
    known = of(lambda row: generator.random(3))
    assert list(known.values())[2:] == ["never the same"] * 2


def test_a_dataset_with_a_fingerprint_of_its_own_is_not_read() -> None:
    data = SimpleNamespace(train=Items(lambda row: 1 / 0), validation=Items(lambda row: 1 / 0))
    with pytest.raises(RowError, match=r"data.train: row 0 .* ZeroDivisionError"):
        fingerprint_of(data)
    data.fingerprint = lambda: {"tokens": 12, "split": "by chunk"}
    assert fingerprint_of(data) == {"rows": 9, "validation_rows": 9, "tokens": 12, "split": "by chunk"}


def test_another_vocabulary_is_other_data() -> None:
    one, other = (fingerprint_of(SyntheticTokens(seq_len=4, vocab_size=size)) for size in (8, 9))
    assert one["rows"] == other["rows"]
    assert one != other
