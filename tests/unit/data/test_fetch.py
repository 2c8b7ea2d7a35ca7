"""Rows read by number: the same random numbers whoever reads them, and errors that say which row."""

import os
import random
import signal
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from zerotrain.data import fetch as fingerprint
from zerotrain.data.batches import rows_at
from zerotrain.data.fetch import (
    RowError,
    as_inputs,
    draws,
    fetch_rows,
    fingerprint_of,
    in_time,
    labels_of,
    num_labels,
    to_device,
)
from zerotrain.files.suspension import suspended_s, watch_suspensions


class Noisy:
    """Each item holds its number and what torch, Python and numpy draw."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [torch.rand(()).item(), random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor(row), torch.tensor(drawn, dtype=torch.float64)

    def __len__(self) -> int:
        return 100


class Bad(Noisy):
    def __getitem__(self, row: int) -> Any:
        if row == 7:
            raise FileNotFoundError("shard_7.png")
        return torch.zeros(row)


class Ended:
    """Rows of an iterator that has fewer."""

    def __getitem__(self, row: int) -> int:
        return next(iter(()))


class Whole:
    """Gives whole batches, as our own datasets do."""

    def rows(self, rows: list[int]) -> torch.Tensor:
        if max(rows) > 99:
            raise IndexError(f"row {max(rows)} of 100")
        return torch.tensor(rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor(row)


def drawn_by(rows: list[int], *, seed: int = 3, epoch: int = 0) -> dict[int, list[float]]:
    numbers, values = fetch_rows(Noisy(), rows, seed=seed, epochs=[epoch] * len(rows), step=1)
    return dict(zip(numbers.tolist(), values.tolist(), strict=True))


@pytest.mark.case(
    "losses",
    "Random augmentation in `__getitem__` or in collate",
    "a function of seed, epoch and rows; the generators of the process stay as they are",
)
def test_what_a_row_draws_depends_on_seed_epoch_and_row_alone() -> None:
    together = drawn_by([4, 8, 15, 16])
    torch.manual_seed(99)
    random.seed(99)
    assert drawn_by([16, 4]) | drawn_by([15]) | drawn_by([8]) == together
    drawn = [*together.values(), *drawn_by([4], epoch=1).values(), *drawn_by([4], seed=4).values()]
    assert len({number for values in drawn for number in values}) == 6 * 4


@pytest.mark.case("losses", "Random augmentation in `__getitem__` or in collate")
def test_the_generators_are_as_before_also_after_an_exception() -> None:
    def draw(between: Callable[[], object]) -> tuple[float, float, float]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        between()
        return torch.rand(1).item(), random.random(), np.random.rand()

    def read() -> None:
        drawn_by([1, 2])
        with pytest.raises(RowError):
            fetch_rows(Bad(), [1, 7], seed=0, epochs=[0, 0], step=1)

    assert draw(read) == draw(lambda: None)


def test_what_collate_draws_depends_on_the_rows_of_its_batch() -> None:
    def masked(items: list[Any]) -> torch.Tensor:
        return torch.rand(len(items))

    first = fetch_rows([0] * 9, [1, 2], seed=0, epochs=[0, 0], step=1, collate=masked)
    again = fetch_rows([0] * 9, [1, 2], seed=0, epochs=[0, 0], step=5, collate=masked)
    assert torch.equal(first, again)
    for others in ([2, 1], [3, 2], [1, 3]):  # behind the same row, too
        other = fetch_rows([0] * 9, others, seed=0, epochs=[0, 0], step=1, collate=masked)
        assert not torch.equal(first, other)
    assert not torch.equal(first, fetch_rows([0] * 9, [1, 2], seed=0, epochs=[1, 0], step=1, collate=masked))


@pytest.mark.case(
    "losses", "An exception in `__getitem__` or in collate", "named by row, epoch and step; the user's own is its cause"
)
@pytest.mark.parametrize(
    ("dataset", "rows", "collate", "message", "cause"),
    [
        (Bad(), [3, 7], None, "row 7 (epoch 3, step 5) cannot be read: FileNotFoundError: shard_7", FileNotFoundError),
        (Bad(), [1, 2], None, "rows 1, 2 (epochs 2, 3, step 5) cannot be collated into a batch: Runt", RuntimeError),
        (Noisy(), [4], itemgetter(1), "row 4 (epoch 2, step 5) cannot be collated into a batch: Index", IndexError),
        (Whole(), [1, 200], None, "rows 1, 200 (epochs 2, 3, step 5) cannot be read: IndexError: row", IndexError),
        (Ended(), [7], None, "row 7 (epoch 2, step 5) cannot be read: StopIteration: ", StopIteration),
    ],
    ids=["item", "shapes", "collate", "whole batch", "an iterator that has ended"],
)
def test_an_exception_says_row_epoch_and_step_and_keeps_its_cause(
    dataset: Any, rows: list[int], collate: Callable[..., Any] | None, message: str, cause: type
) -> None:
    with pytest.raises(RowError) as failed:
        fetch_rows(dataset, rows, seed=0, epochs=[2, 3][: len(rows)], step=5, collate=collate)
    assert str(failed.value).startswith(f"data.train: {message}")
    assert isinstance(failed.value.__cause__, cause)


def test_a_dataset_that_gives_whole_batches_is_asked_once_unless_there_is_a_collate() -> None:
    assert fetch_rows(Whole(), [5, 3], seed=0, epochs=[0, 0], step=1).tolist() == [5, 3]
    assert fetch_rows(Whole(), [5, 3], seed=0, epochs=[0, 0], step=1, collate=lambda items: items[::-1]) == [3, 5]


def test_only_what_draws_nothing_may_be_read_beside_the_model() -> None:
    silent = Noisy()
    silent.draws = False  # type: ignore[attr-defined]
    tensors = TensorDataset(torch.zeros(3, 2))
    assert not any(map(draws, (Whole(), [(0, 1)], tensors, silent)))
    assert draws(Noisy())
    assert draws([0], collate=lambda items: items)


class OneBad:
    """A token, or a label, of 300 in row 5."""

    def __init__(self, of: str, given: type, token: int = 300) -> None:
        self._of, self._given, self._token = of, given, token

    def __getitem__(self, row: int) -> Any:
        ids, labels = torch.zeros(4, dtype=torch.int64), torch.full((4,), -100)
        {"ids": ids, "labels": labels}[self._of][2] = self._token if row == 5 else 0
        return {"input_ids": ids, "labels": labels} if self._given is dict else (ids, labels)


@pytest.mark.parametrize("of", ["ids", "labels"])
@pytest.mark.parametrize("given", [tuple, dict])
@pytest.mark.parametrize("token", [300, 256, -1])
def test_a_token_that_the_model_does_not_know_is_told_with_its_row(of: str, given: type, token: int) -> None:
    """It was "index out of range in self", hours into a run."""
    dataset, place = OneBad(of, given, token), {"seed": 0, "epochs": [2, 2, 3], "step": 9, "vocab_size": 256}
    with pytest.raises(RowError) as told:
        fetch_rows(dataset, [1, 5, 0], **place)
    assert str(told.value) == (
        "data.train: row 5 (epoch 2, step 9) cannot be trained on: ValueError: the token "
        f"{token} is not among the model's, 0 to 255"
    )
    fetch_rows(dataset, [1, 4, 0], **place)
    fetch_rows(dataset, [1, 5, 0], **place | {"vocab_size": None})
    with pytest.raises(RowError, match=r"rows 1, 5, 0 .* the token 999 is not among the model's, 0 to 255"):
        fetch_rows(dataset, [1, 5, 0], **place, collate=lambda _: torch.tensor([0] * 5 + [999]))
    fetch_rows([(torch.rand(3) * 1000, torch.tensor(True))] * 6, [1, 5, 0], **place)  # no row of tokens


class Slow(Noisy):
    """An item takes two seconds, in which a signal interrupts it often."""

    def __getitem__(self, row: int) -> torch.Tensor:
        for _ in range(20):
            time.sleep(0.1)
        return torch.tensor(row)


@pytest.mark.case(
    "hosts: Ranks of one host", "the whole run is suspended for longer than `launch.timeout_s`, as by Slurm"
)
@pytest.mark.waits
def test_the_time_of_a_suspension_does_not_count_for_a_row() -> None:
    """Seen: a row was given up for time in which its process had been stopped."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told: list[float] = []
            watch_suspensions(told.append)
            started_s = time.monotonic()
            os.write(writer, b"begun ")
            with in_time(4.0):
                fetch_rows(Slow(), [5], seed=0, epochs=[0], step=1)
            time.sleep(1.0)
            os.write(writer, f"{suspended_s(started_s):.0f} {suspended_s(time.monotonic())} {len(told)}".encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read(6) == "begun "
        time.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(pid, signal.SIGCONT)
        said = file.read()
    os.waitpid(pid, 0)
    assert said in ("5 0 1", "6 0 1")


# Data that differs has another fingerprint, and equal data the same, whatever the items are.


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
    assert known["items_of_train"].endswith(" of 9 rows")
    for changed in range(9):
        other = of(lambda row, changed=changed: item(99 if row == changed else row))  # type: ignore[misc]
        assert [name for name in known if known[name] != other[name]] == list(known)[2:]
    assert known["rows"] != of(item, size=10)["rows"]


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
    data = SimpleNamespace(train=Items(lambda row: row, size), validation=Items(lambda row: row))
    like = fingerprint_of(data)
    assert fingerprint_of(data, like=like) == like
    few = fingerprint_of(data, like={"items_of_train": "0" * 16 + " of 7 rows"})
    assert few["items_of_train"].endswith(f" of {min(7, size)} rows")
    assert fingerprint_of(data, like=few) == few


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


# What a micro-batch of any structure is to a model.


IDS, LABELS = torch.arange(6).view(2, 3), torch.tensor([[1, 2, -100], [-100, 5, -100]])


class Named(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


@dataclass
class LabelledRow:
    labels: torch.Tensor
    ids: torch.Tensor


@pytest.mark.case("losses", "Items that are dicts, named tuples, single tensors; a batch that is a dataclass")
@pytest.mark.parametrize(
    "batch",
    [
        (IDS, LABELS),
        [IDS, LABELS, IDS],
        {"labels": LABELS, "input_ids": IDS},
        UserDict(input_ids=IDS, labels=LABELS),
        Named(IDS, IDS, LABELS),
        LabelledRow(LABELS, IDS),
    ],
    ids=["pair", "triple", "dict", "mapping", "named tuple", "dataclass"],
)
def test_labels_are_found_in_any_structure_and_stay_there_on_the_way_to_the_device(batch: Any) -> None:
    moved = to_device(batch, torch.device("meta"))
    found = labels_of(moved)
    assert labels_of(batch) is LABELS
    assert num_labels(batch, num_rows=2) == 3
    assert found is not None
    assert found.is_meta
    assert len(as_inputs(moved)) == len(as_inputs(batch))
    assert num_labels(IDS, num_rows=2) == num_labels({"pixels": IDS}, num_rows=2) == 2  # without labels, its rows
    assert as_inputs(IDS) == (IDS,)
