"""What a dataset must give, looked at in its first items: found before any rank starts, and not in the first step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from zerotrain.data.batches import IGNORED_LABEL

NUM_ITEMS = 8
"""Items looked at of each dataset."""
Item = tuple[torch.Tensor, torch.Tensor]


def first_items(data: Any, name: str) -> list[Item]:
    """The first items of `data.train` or `data.validation`, as a batch of one has them: each part (1, ...).

    Raises:
        ValueError: it is no map-style dataset, is empty, or its items are no pairs of tensors of one shape.
    """
    dataset, whole = getattr(data, name, None), f"data.{name}"
    if dataset is None:
        raise ValueError(f"{whole} is missing: the dataset must have map-style datasets train and validation")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"{whole} is of type {type(dataset).__name__}, which cannot be read by number; it must be map-style, with "
            "len() and [index], since each rank reads items of its own"
        )
    if len(dataset) == 0:
        raise ValueError(f"{whole} is empty; it must have at least one item")
    items = [_item(dataset[index], f"{whole}[{index}]") for index in range(min(NUM_ITEMS, len(dataset)))]
    shapes = [tuple(tuple(part.shape[1:]) for part in item) for item in items]
    for index, each in enumerate(shapes):
        if each != shapes[0]:
            raise ValueError(
                f"{whole}[{index}] has shapes {each} and {whole}[0] {shapes[0]}; all items must have the same: pad "
                f"them, with {IGNORED_LABEL} for labels"
            )
    return items


def _item(item: Any, name: str) -> Item:
    if not isinstance(item, tuple | list) or len(item) != 2:
        held = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise ValueError(f"{name} is a {type(item).__name__}{held}; it must be a pair of tensors (ids, labels)")
    parts = default_collate([tuple(item)])
    for part, given, what in zip(parts, item, ("inputs", "labels"), strict=True):
        if not isinstance(part, torch.Tensor):
            raise ValueError(f"the {what} of {name} are a {type(given).__name__}; they must be a tensor or numbers")
    return parts[0], parts[1]


def require_next_tokens(items: Sequence[Item], name: str, *, model: str, vocab_size: int | None) -> None:
    """Check that items are what a model learns whose labels[t] is the token after ids[t].

    Args:
        items: from `first_items`.
        name: of the dataset they are from.
        model: what the model is called.
        vocab_size: tokens it knows; None where it does not say.

    Raises:
        ValueError: they are not.
    """
    for index, (ids, labels) in enumerate(items):
        if ids.dtype not in (torch.int32, torch.int64) or labels.dtype != torch.int64 or ids.shape != labels.shape:
            raise ValueError(
                f"{name}[{index}] has {_described(ids)} for ids and {_described(labels)} for labels; {model} takes "
                "int64 tensors of one shape"
            )
        tokens = torch.cat([ids.flatten().long(), labels[labels != IGNORED_LABEL]]).tolist()
        unknown = [token for token in tokens if token < 0 or (vocab_size is not None and token >= vocab_size)]
        if unknown:
            known = "from 0 on" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            raise ValueError(
                f"{name}[{index}] has the token {unknown[0]}, but {model} knows the tokens {known}; labels that do not "
                f"count are {IGNORED_LABEL}"
            )
    if items and items[0][0].ndim == 2 and _are_repeated(items):
        raise ValueError(
            f"the labels of the first items of {name} equal their ids; {model} learns labels[t] as the token after "
            "ids[t], and would learn to copy: give tokens[:-1] as ids and tokens[1:] as labels"
        )


def _are_repeated(items: Sequence[Item]) -> bool:
    """Whether all labels that count equal the ids beside them, and some not the ids after them: a row of one token
    does both."""
    counts = [labels != IGNORED_LABEL for _, labels in items]
    repeated = all((ids == labels)[count].all() for (ids, labels), count in zip(items, counts, strict=True))
    next_ones = [
        (ids[:, 1:] == labels[:, :-1])[count[:, :-1]] for (ids, labels), count in zip(items, counts, strict=True)
    ]
    return repeated and not all(each.all() for each in next_ones)


def _described(part: torch.Tensor) -> str:
    return f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape[1:])}"
