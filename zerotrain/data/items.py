"""Checks the first items of a dataset: errors are found before any rank starts."""

import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from zerotrain.data import fetch
from zerotrain.data.batches import IGNORED_LABEL

NUM_ITEMS = 8
"""Items looked at of each dataset."""
OTHERWISE = "make a tensor of it, leave it out, or give data.collate_fn, which makes a batch of a list of items"


def first_batches(
    dataset: Any, name: str, *, seed: int = 0, collate: fetch.Collate | None = None, is_mixed: bool = False
) -> list[Any]:
    """The first items of a dataset, each as a batch of one: read and put together as they will be in a run. The first
    of all is `longest_row` of a dataset that has this.

    Args:
        name: of the dataset, such as "data.train".
        seed, collate: as `fetch_rows` takes them.
        is_mixed: it is a source of a mix, which reads item by item.

    Raises:
        ValueError: it is no map-style dataset or is empty, an item has parts that no batch can be made of, the items
            cannot stand in one batch, or the dataset says something untrue of itself.
        RowError: the dataset or collate raised an exception.
    """
    if sources := getattr(dataset, "sources", {}):
        names = [source_name(name, source) for source in sources]
        groups = [
            first_batches(source, source_path, seed=seed, collate=collate, is_mixed=True)
            for source_path, source in zip(names, sources.values(), strict=True)
        ]
        if collate is None:
            _require_one_shape([group[0] for group in groups], [f"{source_path}[0]" for source_path in names])
        return [batch for group in groups for batch in group]
    _require_map_style(dataset, name)
    first_rows = range(min(NUM_ITEMS, len(dataset)))
    rows = [*dict.fromkeys([getattr(dataset, "longest_row", 0), *first_rows])][: len(first_rows)]
    pads = hasattr(dataset, "rows") and not is_mixed

    def read(rows: Sequence[int], collate: fetch.Collate | None) -> Any:
        if is_mixed and collate is None and hasattr(dataset, "rows"):
            collate = default_collate
        return fetch.fetch_rows(dataset, rows, seed=seed, epochs=[0] * len(rows), step=1, name=name, collate=collate)

    if collate is None and not pads:
        for row in rows[:2]:
            _require_parts(read([row], lambda items: items[0]), name, row)
    rng_state = torch.get_rng_state()
    batches = [read([row], collate) for row in rows]
    if not fetch.draws(dataset, collate) and not torch.equal(rng_state, torch.get_rng_state()):
        raise ValueError(
            f"{name} draws random numbers though it has draws = False; leave that out, or draw from a generator that "
            "is made in __getitem__"
        )
    if collate is None and not pads:
        _require_one_shape(batches, [f"{name}[{row}]" for row in rows])
    read(rows, collate)
    _require_as_many_labels(dataset, batches, name)
    return batches


def source_name(name: str, source: str) -> str:
    """The name for a source of a mix: "data.sources.code.data.train" for "data.train"."""
    if name.startswith("data.validation_sets."):
        return f"{name}.sources.{source}.data"
    return name.replace("data.", f"data.sources.{source}.data.", 1)


def _require_map_style(dataset: Any, name: str) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not all(
        hasattr(dataset, method) for method in ("__getitem__", "__len__")
    ):
        raise ValueError(
            f"{name} is of type {kind}, which cannot be indexed; it must be map-style, with len() and [index], because "
            "each rank, and a run that is resumed, reads other items. Write a stream to files first"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty; it must have at least one item")


def _require_parts(item: Any, name: str, row: int) -> None:
    """Check that torch's `default_collate` makes tensors of an item's parts, and not lists."""
    for path, part in _parts(item, f"{name}[{row}]"):
        if isinstance(part, list):
            raise ValueError(f"{path} is a list of numbers; give torch.tensor(...) of it, or data.collate_fn")
        if not isinstance(part, torch.Tensor | np.ndarray | np.number | numbers.Number):
            raise ValueError(
                f"{path} is of type {type(part).__name__}; a batch is made of tensors and numbers: {OTHERWISE}"
            )
        if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
            raise ValueError(f"{path} is an array of {part.dtype}; it must be one of numbers: {OTHERWISE}")


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    """(where it stands, part) of each part of an item; a list of numbers is one part."""
    if isinstance(value, Mapping):
        return [entry for key, part in value.items() for entry in _parts(part, f"{path}[{key!r}]")]
    is_list = isinstance(value, list) and bool(value) and all(isinstance(part, numbers.Number) for part in value)
    if isinstance(value, list | tuple) and not is_list:
        names = getattr(value, "_fields", range(len(value)))
        return [
            entry
            for key, part in zip(names, value, strict=True)
            for entry in _parts(part, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]")
        ]
    return [(path, value)]


def _require_one_shape(batches: Sequence[Any], names: Sequence[str]) -> None:
    shapes = [
        {path: tuple(part.shape[1:]) for path, part in _parts(batch, "") if isinstance(part, torch.Tensor)}
        for batch in batches
    ]
    texts = [", ".join(f"{path} {shape}".strip() for path, shape in parts.items()) for parts in shapes]
    for name, parts, text in zip(names, shapes, texts, strict=True):
        if parts != shapes[0]:
            raise ValueError(
                f"{name} has shapes {text} and {names[0]} shapes {texts[0]}; all items must have the same: pad them, "
                f"with {IGNORED_LABEL} for labels, or give data.collate_fn, which pads each micro-batch"
            )


def _require_as_many_labels(dataset: Any, batches: Sequence[Any], name: str) -> None:
    """Check that `tokens_per_sequence` is right, by which the ranks weigh their losses without asking each other."""
    num_promised = getattr(dataset, "tokens_per_sequence", None)
    for row, batch in enumerate(batches):
        if num_promised is not None and (num_counted := fetch.num_labels(batch, num_rows=1)) != num_promised:
            raise ValueError(
                f"{name}.tokens_per_sequence is {num_promised}, but {name}[{row}] has {num_counted} labels "
                "that count; give the number that all items have, or leave it out where they differ"
            )


def require_taken(batches: Sequence[Any], name: str, model: torch.nn.Module) -> None:
    """Check a model's forward with items.

    Args:
        batches: from `first_batches`.
        name: of the dataset they are from.
        model: on any device; nothing is computed.

    Raises:
        ValueError: it takes other arguments, or would give no loss.
    """
    signature = inspect.signature(model.forward)
    names = ", ".join(parameter for parameter in signature.parameters if parameter != fetch.WITH_OUTPUTS)
    signature_text = f"{type(model).__name__}.forward takes ({names})"
    for row, batch in enumerate(batches[:2]):
        inputs, item_name = fetch.as_inputs(batch), f"{name}[{row}]"
        if isinstance(inputs, Mapping):
            item_text = ", ".join(str(key) for key in inputs) or "nothing"
        else:
            item_text = f"{len(inputs)} part{'s' if len(inputs) != 1 else ''} without names"
        try:
            bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
        except TypeError as error:
            problem = f"{item_name} gives {item_text}, but {signature_text}: {error}"
            if fetch.labels_of(batch) is not None and fetch.LABELS not in signature.parameters:
                problem += "; a model that returns outputs needs a loss beside it, such as loss=cross_entropy"
            raise ValueError(problem) from error
        if fetch.LABELS in signature.parameters and bound.arguments.get(fetch.LABELS) is None:
            raise ValueError(
                f"{item_name} gives {item_text} and no labels, but {signature_text}: it returns the loss only with "
                "labels; make the items pairs of tensors (ids, labels), or dicts with the key labels"
            )


def require_next_tokens(batches: Sequence[Any], name: str, *, model: str, vocab_size: int | None) -> None:
    """Check that items are what a model learns whose labels[t] is the token after ids[t].

    Args:
        batches: from `first_batches`.
        name: of the dataset they are from.
        model: the name of the model.
        vocab_size: tokens it knows; None where it does not say.

    Raises:
        ValueError: they are not.
    """
    pairs = [_ids_and_labels(batch, f"{name}[{index}]", model) for index, batch in enumerate(batches)]
    for index, pair in enumerate(pairs):
        unknown = fetch.unknown_token(pair, 2**63 - 1 if vocab_size is None else vocab_size)
        if unknown is not None:
            allowed = "from 0 on" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            raise ValueError(
                f"{name}[{index}] has the token {unknown[1]}, but {model} knows the tokens {allowed}; ignored labels "
                f"are {IGNORED_LABEL}"
            )
    if pairs and pairs[0][0].ndim == 2 and _labels_repeat_ids(pairs):
        raise ValueError(
            f"the labels of the first items of {name} equal their ids; {model} learns labels[t] as the token after "
            "ids[t], so that it would learn to copy: give tokens[:-1] as ids and tokens[1:] as labels"
        )


def _ids_and_labels(batch: Any, name: str, model: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = fetch.ids_of(batch), fetch.labels_of(batch)
    if (
        ids is None
        or labels is None
        or ids.shape != labels.shape
        or ids.dtype not in (torch.int32, torch.int64)
        or labels.dtype != torch.int64
    ):
        raise ValueError(
            f"{name} has {_describe(ids)} for ids and {_describe(labels)} for labels; {model} takes int64 tensors of "
            "one shape"
        )
    return ids, labels


def _labels_repeat_ids(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether all labels that count equal the ids beside them, and some differ from the ids after them. Labels of a
    row of one token equal both."""
    are_next = True
    for ids, labels in items:
        count = labels != IGNORED_LABEL
        if not (ids == labels)[count].all():
            return False
        are_next = are_next and bool((ids[:, 1:] == labels[:, :-1])[count[:, :-1]].all())
    return not are_next


def _describe(part: torch.Tensor | None) -> str:
    return "nothing" if part is None else f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape[1:])}"
