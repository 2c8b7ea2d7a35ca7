"""What is found in the first items of a dataset, before any rank starts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from zerotrain.data.items import first_batches, require_next_tokens, require_taken
from zerotrain.data.mix import MixedRows

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9])
PAIR = (TOKENS[:-1], TOKENS[1:])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([PAIR])


class WithoutLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return PAIR


class Told(list[Any]):
    """Items, and what their dataset says of itself."""

    def __init__(self, items: list[Any], **told: Any) -> None:
        super().__init__(items)
        vars(self).update(told)


class Drawing(Told):
    def __getitem__(self, index: Any) -> Any:
        torch.rand(1)
        return super().__getitem__(index)


@pytest.mark.case("losses", "`tokens_per_sequence` or `draws = False` that is not so", "refused before any rank starts")
@pytest.mark.case(
    "losses",
    "An `IterableDataset`, no `len()`, an empty dataset, strings, lists of numbers, items of "
    "several shapes without a collate function",
    "refused before any rank starts, by the first 8 items, in one line",
)
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Stream(), r"^data\.train is of type Stream, which cannot be indexed; it must be map-style, with len"),
        (WithoutLength(), r"^data\.train is of type WithoutLength, which cannot be indexed"),
        ([], r"^data\.train is empty; it must have at least one item$"),
        (["text"], r"^data\.train\[0\] is of type str; a batch is made of tensors and numbers: make a tensor of it, "),
        ([("text", TOKENS)], r"^data\.train\[0\]\[0\] is of type str; "),
        ([{"ids": TOKENS, "text": None}], r"^data\.train\[0\]\['text'\] is of type NoneType; .* data\.collate_fn"),
        ([(TOKENS, [1, 2])], r"^data\.train\[0\]\[1\] is a list of numbers; give torch\.tensor"),
        ([(np.array(["a"]), 1)], r"^data\.train\[0\]\[0\] is an array of <U1; "),
        ([PAIR, (TOKENS, TOKENS)], r"^data\.train\[1\] has shapes \[0\] \(6,\), \[1\] \(6,\) and data\.train\[0\] sha"),
        (Told([PAIR], tokens_per_sequence=6), r"^data\.train\.tokens_per_sequence is 6, but .*\[0\] has 5 labels that"),
        (Drawing([PAIR], draws=False), r"^data\.train draws random numbers though it has draws = False; "),
    ],
)  # fmt: skip
def test_a_dataset_that_cannot_be_read_says_what_it_must_be(train: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first_batches(train, "data.train")


def test_tensors_arrays_and_numbers_of_any_kind_are_taken_and_no_more_items_read_than_are_looked_at() -> None:
    image = (np.ones((3, 4, 4), dtype=np.float32), 7)
    items = first_batches([image] * 8 + [None], "data.train")
    assert len(items) == 8
    assert [part.shape for part in items[0]] == [(1, 3, 4, 4), (1,)]


class Model(torch.nn.Module):
    def forward(self, ids: Any, labels: Any = None) -> Any: ...


class ModelOfImages(torch.nn.Module):
    def forward(self, pixels: Any, **more: Any) -> Any: ...


@pytest.mark.case(
    "losses",
    "Items that are dicts, named tuples, single tensors; a batch that is a dataclass",
    "named or positional arguments of the model; labels are found by name, or second",
)
@pytest.mark.parametrize(
    ("item", "model"),
    [
        (PAIR, Model()),
        ({"labels": TOKENS, "ids": TOKENS}, Model()),
        (TOKENS, ModelOfImages()),
        ({"pixels": TOKENS, "mask": TOKENS}, ModelOfImages()),
    ],
)
def test_items_of_any_structure_are_taken_by_a_model_with_such_arguments(item: Any, model: torch.nn.Module) -> None:
    require_taken(first_batches([item], "data.train"), "data.train", model)


@pytest.mark.case(
    "losses",
    "Items the model's `forward` does not take, without the labels it needs, or with tokens it does not know",
    "likewise",
)
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            (*PAIR, TOKENS),
            r"^data\.train\[0\] gives 3 parts without names, but Model\.forward takes \(ids, labels\): too",
        ),
        (TOKENS, r"^data\.train\[0\] gives 1 part without names and no labels, but Model\.forward takes \(ids, "),
        ({"input_ids": TOKENS, "labels": TOKENS}, r"gives input_ids, labels, but Model.* (missing|unexpected)"),
        ({"ids": TOKENS}, r"gives ids and no labels, but Model\.forward takes \(ids, labels\): it returns the loss"),
    ],
)
def test_items_that_the_model_cannot_be_called_with_are_refused(item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_taken(first_batches([item], "data.train"), "data.train", Model())


def test_items_that_no_batch_can_be_made_of_may_have_a_collate_function() -> None:
    def pad(items: list[str]) -> torch.Tensor:
        longest = max(map(len, items))
        return torch.tensor([list(text.ljust(longest).encode()) for text in items])

    batches = first_batches(["a", "abc"], "data.train", collate=pad)
    assert [tuple(batch.shape) for batch in batches] == [(1, 1), (1, 3)]


def check(*items: tuple[Any, Any], vocab_size: int | None = 10) -> None:
    batched = first_batches(list(items), "data.train")
    require_next_tokens(batched, "data.train", model="GPT", vocab_size=vocab_size)


def masked(labels: torch.Tensor, *places: int) -> torch.Tensor:
    return labels.index_fill(0, torch.tensor(places, dtype=torch.int64), -100)


def test_labels_that_are_the_next_tokens_pass_masked_or_of_one_token_alone() -> None:
    check(PAIR)
    check((TOKENS, masked(TOKENS.roll(-1), 0, 1, 5)), vocab_size=None)
    check((torch.ones(4, dtype=torch.int64),) * 2)
    check((TOKENS, masked(TOKENS, *range(6))))
    check((TOKENS, TOKENS), (TOKENS, TOKENS.roll(-1)))  # one row says that they are shifted


@pytest.mark.case(
    "losses", "Items the model's `forward` does not take, without the labels it needs, or with tokens it does not know"
)
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(TOKENS, TOKENS)], "^the labels of the first items of data.train equal their ids; GPT learns labels"),
        ([(TOKENS, masked(TOKENS, 0, 1))] * 2, r"would learn to copy: give tokens\[:-1\] as ids and tokens\[1:\] as"),
        ([(TOKENS.int(), TOKENS.int())], r"^data\.train\[0\] has int32 \(6,\) for ids and int32 \(6,\) for labels; "),
        ([(TOKENS, TOKENS.float())], "float32"),
        ([(TOKENS, TOKENS[:2])], r"int64 \(6,\) for ids and int64 \(2,\) for labels"),
        ([PAIR, (TOKENS[:-1] * 3, TOKENS[1:])], r"^data\.train\[1\] has the token 12, but GPT knows .* from 0 to 9"),
        ([(TOKENS, TOKENS.roll(-1).index_fill(0, torch.tensor([0]), -1))], "the token -1, .* ignored labels are -100"),
    ],
)  # fmt: skip
def test_items_that_the_model_would_learn_wrongly_are_refused(items: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(*items)


def test_the_items_of_each_source_of_a_mix_are_looked_at() -> None:
    def mixed(*others: Any) -> MixedRows:
        return MixedRows({"a": [PAIR] * 9, "b": [*others]}, {"a": 1, "b": 1})

    assert len(first_batches(mixed(PAIR), "data.train")) == 9
    with pytest.raises(ValueError, match=r"^data\.sources\.b\.data\.train\[1\]\[0\] is of type str; "):
        first_batches(mixed(PAIR, ("text", TOKENS)), "data.train")
    with pytest.raises(
        ValueError, match=r"^data\.sources\.b\.data\.train\[0\] has .* and data\.sources\.a\.data\.train\[0\]"
    ):
        first_batches(mixed((TOKENS, TOKENS)), "data.train")
