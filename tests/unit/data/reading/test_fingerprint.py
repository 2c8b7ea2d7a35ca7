"""Data that differs has another fingerprint, and equal data the same, whatever the items are."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerotrain.data import Mix, SyntheticTokens
from zerotrain.data import fetch as fingerprint
from zerotrain.data.batches import rows_at
from zerotrain.data.fetch import RowError, fingerprint_of


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


@pytest.mark.parametrize("changed", [1, 7, 134])
def test_one_row_of_few_that_differs_is_seen(changed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_CHEAP_S", 60.0)  # however busy the machine is
    known = of(lambda row: row, size=136)
    assert known["items_of_train"].endswith(" of 136 rows")
    assert of(lambda row: -row if row == changed else row, size=136) != known


def test_of_many_rows_a_thousand_are_read_and_of_slow_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(fingerprint, "_CHEAP_S", 0.0)
        busy.setattr(fingerprint, "_MAX_S", 60.0)
        known = of(lambda row: row, size=10**9)["items_of_train"]
        assert known.endswith(" of 1000 rows, half of them the first of a run")
    slow = of(lambda row: time.sleep(0.1) or row, size=50)["items_of_train"]
    assert 3 <= int(slow.split()[2]) <= 10


@pytest.mark.parametrize("own_order", [False, True])
def test_what_the_first_steps_read_is_compared_of_many_rows_too(own_order: bool) -> None:
    """Seen: rows that lie between those evenly spread ones were trained on, and not compared."""
    seed, size, changed = 3, 10**6, set[int]()

    def order(positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        return positions * 7 + 5, positions * 0

    def known(**more: Any) -> str:
        train = Items(lambda row: -row if row in changed else row, size)
        if own_order:
            train.order = order
        return str(fingerprint_of(SimpleNamespace(train=train, validation=Items(int)), seed, **more)["items_of_train"])

    of_enough = {"items_of_train": f"{'0' * 16} of 200 rows, half of them the first of a run"}
    before, evenly = known(like=of_enough), known(like={"items_of_train": f"{'0' * 16} of 200 rows"})
    assert before.split(" ", 1)[1] == of_enough["items_of_train"].split(" ", 1)[1]
    assert known(like={"items_of_train": before}) == before
    read_99th = 99 * 7 + 5 if own_order else rows_at(99, seed=seed, num_rows=size).item()
    changed.add(read_99th)
    assert known(like=of_enough) != before
    assert known(like={"items_of_train": evenly}) == evenly  # as a checkpoint of an earlier release has it


@pytest.mark.parametrize("size", [1, 2, 9, 136, 137, 5000])
def test_as_many_rows_are_read_as_for_the_one_to_compare_with(size: int) -> None:
    """However many the machine would take by itself."""
    read: list[int] = []
    data = SimpleNamespace(train=Items(lambda row: read.append(row) or row, size), validation=Items(lambda row: row))
    like = fingerprint_of(data)
    assert fingerprint_of(data, like=like) == like
    few = fingerprint_of(data, like={"items_of_train": "0" * 16 + " of 7 rows"})
    assert few["items_of_train"].endswith(f" of {min(7, size)} rows")
    assert fingerprint_of(data, like=few) == few
    read.clear()
    of_three = fingerprint_of(data, like={"items_of_train": "0" * 16})
    assert sorted(set(read)) == sorted({0, size // 2, size - 1})
    items = [hashlib.sha256(f"int {row} ".encode()).hexdigest() for row in sorted(set(read))]
    assert of_three["items_of_train"] == hashlib.sha256("".join(items).encode()).hexdigest()[:16]


def test_sets_and_sources_are_read_as_for_the_one_to_compare_with() -> None:
    data = SimpleNamespace(train=Items(lambda row: row, 50), validation=Items(lambda row: row))
    mix = Mix({name: {"data": data, "weight": 1} for name in ("a", "b")})
    whole = fingerprint_of(mix, validation_sets={"more": data})
    items = [name for name in whole if "items_of" in name]
    assert len(items) == 6
    like = whole | {name: "0" * 16 + f" of {number} rows" for number, name in enumerate(items, start=3)}
    told = fingerprint_of(mix, validation_sets={"more": data}, like=like)
    assert [told[name].split(" ", 1)[1] for name in items] == [like[name].split(" ", 1)[1] for name in items]


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
