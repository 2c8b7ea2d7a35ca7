"""What is found in the first items of a dataset, before any rank starts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from zerotrain.data.items import first_items, require_next_tokens

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9])
PAIR = (TOKENS[:-1], TOKENS[1:])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([PAIR])


class WithoutLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return PAIR


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, r"^data\.train is missing: "),
        (Stream(), r"^data\.train is of type Stream, which cannot be read by number; it must be map-style, with len"),
        (WithoutLength(), r"^data\.train is of type WithoutLength, which cannot be read by number"),
        (iter([PAIR]), r"^data\.train is of type list_iterator, which"),
        ([], r"^data\.train is empty; it must have at least one item$"),
        ([{"ids": TOKENS}], r"^data\.train\[0\] is a dict; it must be a pair of tensors \(ids, labels\)$"),
        ([(*PAIR, TOKENS)], r"^data\.train\[0\] is a tuple of 3; it must be a pair"),
        ([TOKENS], r"^data\.train\[0\] is a Tensor; "),
        ([("text", TOKENS)], r"^the inputs of data\.train\[0\] are a str; they must be a tensor or numbers$"),
        ([(TOKENS, [1, 2])], r"^the labels of data\.train\[0\] are a list; "),
        ([PAIR, (TOKENS, TOKENS)], r"^data\.train\[1\] has shapes \(\(6,\), \(6,\)\) and data\.train\[0\] "),
    ],
)  # fmt: skip
def test_a_dataset_that_cannot_be_read_says_what_it_must_be(train: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first_items(SimpleNamespace(train=train), "train")


def test_tensors_arrays_and_numbers_of_any_kind_are_taken_and_no_more_items_read_than_are_looked_at() -> None:
    image = (np.ones((3, 4, 4), dtype=np.float32), 7)
    items = first_items(SimpleNamespace(train=[image] * 8 + [None]), "train")
    assert len(items) == 8
    assert [part.shape for part in items[0]] == [(1, 3, 4, 4), (1,)]


def check(*items: tuple[Any, Any], vocab_size: int | None = 10) -> None:
    batched = first_items(SimpleNamespace(train=list(items)), "train")
    require_next_tokens(batched, "data.train", model="GPT", vocab_size=vocab_size)


def masked(labels: torch.Tensor, *places: int) -> torch.Tensor:
    return labels.index_fill(0, torch.tensor(places, dtype=torch.int64), -100)


def test_labels_that_are_the_next_tokens_pass_masked_or_of_one_token_alone() -> None:
    check(PAIR)
    check((TOKENS, masked(TOKENS.roll(-1), 0, 1, 5)), vocab_size=None)
    check((torch.ones(4, dtype=torch.int64),) * 2)
    check((TOKENS, masked(TOKENS, *range(6))))
    check((TOKENS, TOKENS), (TOKENS, TOKENS.roll(-1)))  # one row says that they are shifted


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(TOKENS, TOKENS)], "^the labels of the first items of data.train equal their ids; GPT learns labels"),
        ([(TOKENS, masked(TOKENS, 0, 1))] * 2, r"would learn to copy: give tokens\[:-1\] as ids and tokens\[1:\] as"),
        ([(TOKENS.int(), TOKENS.int())], r"^data\.train\[0\] has int32 \(6,\) for ids and int32 \(6,\) for labels; "),
        ([(TOKENS, TOKENS.float())], "float32"),
        ([(TOKENS, TOKENS[:2])], r"int64 \(6,\) for ids and int64 \(2,\) for labels"),
        ([PAIR, (TOKENS[:-1] * 3, TOKENS[1:])], r"^data\.train\[1\] has the token 12, but GPT knows .* from 0 to 9"),
        ([(TOKENS, TOKENS.roll(-1).index_fill(0, torch.tensor([0]), -1))], "the token -1, .* do not count are -100"),
    ],
)  # fmt: skip
def test_items_that_the_model_would_learn_wrongly_are_refused(items: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(*items)
