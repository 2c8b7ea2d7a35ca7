"""The identity of a dataset, in a few numbers and texts that ranks compare, and a resumed run."""

import hashlib
import re
import statistics
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from zerotrain.data.reading.batches import OF_SET
from zerotrain.data.reading.fetch import fetch_rows
from zerotrain.data.reading.inputs import as_inputs
from zerotrain.data.reading.order import rows_at

Fingerprint = dict[str, int | str]
_NUM_ORDERED = 1000
"""First rows of an order of the dataset's own, such as that of a mix, which its weights change."""
_NUM_SPREAD = 1000
_CHEAP_S, _MAX_S = 0.25, 1.0
"""All rows of a dataset are read where that takes so little, and `_NUM_SPREAD` of more, or as many as take `_MAX_S`."""
_MOST = 100_000
"""What a file says of its data is no reason to read more."""
_FIRST = ", half of them the first of a run"
"""Said of rows to train on which are not all."""
_NUM_ROWS = re.compile(rf"\w{{16}} of (\d{{1,9}}) rows({_FIRST})?")
_OF_THREE = re.compile(r"\w{16}")
"""The form in a checkpoint of an earlier release: it is of the first, the middle and the last row."""


def fingerprint_of(
    data: Any,
    seed: int = 0,
    validation_sets: Mapping[str, Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Equal where the rows of `data.train` and `data.validation` are equal, as far as can be told without reading all.

    Args:
        data: its own `fingerprint()` is taken where it has one. Else items are read: all of each dataset where that is
            cheap, or else a thousand at most, evenly spread; of `data.train` half of them are those that a run with
            this seed reads first.
        seed: of the run, which what is drawn for an item follows from.
        validation_sets: further data by name, whose fingerprints are in it too, behind `OF_SET` and the name.
        like: the fingerprint to compare with: as many items are read as were for it. How many are cheap depends on the
            machine.

    Raises:
        RowError: an item could not be read.
    """
    known = _of_one(data, seed, "data", like or {})
    for name, each in (validation_sets or {}).items():
        of_set = _of_one(each, seed, f"data.validation_sets.{name}", within(like or {}, f"{OF_SET}{name}."))
        known |= {f"{OF_SET}{name}.{what}": value for what, value in of_set.items()}
    return known


def within(known: Mapping[str, Any], prefix: str) -> Fingerprint:
    """The part of a fingerprint whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): value for name, value in known.items() if name.startswith(prefix)}


def _of_one(data: Any, seed: int, called: str, like: Mapping[str, Any]) -> Fingerprint:
    known: Fingerprint = {"rows": len(data.train), "validation_rows": len(data.validation)}
    if hasattr(data.train, "order"):
        first_rows, _ = data.train.order(np.arange(_NUM_ORDERED), seed=seed)
        known["order"] = hashlib.sha256(first_rows.astype("<i8").tobytes()).hexdigest()[:16]
    if callable(getattr(data, "fingerprint", None)):
        of_data = data.fingerprint(like) if getattr(data.train, "sources", None) else data.fingerprint()
        # What was wrapped since may have other rows than the dataset itself knows of.
        return {str(name): value for name, value in of_data.items()} | known
    for name in ("train", "validation"):
        if len(dataset := getattr(data, name)):
            key = f"items_of_{name}"
            is_trained = name == "train"
            known[key] = _of_items(dataset, seed, f"{called}.{name}", str(like.get(key, "")), is_trained=is_trained)
    return known


def _of_items(dataset: Any, seed: int, name: str, like: str, *, is_trained: bool) -> str:
    """The hash of some items, and how many they are. Of those to train on, the ones that the first steps of a run read
    are among them."""
    length, hashes, costs_s = len(dataset), dict[int, str](), list[float]()
    rows = sorted({0, length // 2, length - 1})
    for row in rows:
        started_s = time.perf_counter()
        hashes[row] = _hash_of_item(dataset, row, seed, name)
        costs_s.append(time.perf_counter() - started_s)
    if _hash_of_item(dataset, 0, seed, name) != hashes[0]:
        return "never the same"
    how_many = ""
    if not _OF_THREE.fullmatch(like):
        cost_s, number = statistics.median(costs_s), _NUM_ROWS.fullmatch(like)
        num_wanted = int(number[1]) if number else max(_CHEAP_S / cost_s, min(_NUM_SPREAD, _MAX_S / cost_s), len(rows))
        num_rows = int(min(num_wanted, length, _MOST))
        how_many = f" of {num_rows} rows"
        first: list[int] = []
        if num_rows < length and is_trained and (number is None or number[2]):
            first = _first_rows(dataset, seed, max(num_rows // 2, 1))
            how_many += _FIRST
        num_spread = num_rows - len(first)
        rows = first + [each * (length - 1) // max(num_spread - 1, 1) for each in range(num_spread)]
    for row in rows:
        if row not in hashes:
            hashes[row] = _hash_of_item(dataset, row, seed, name)
    return hashlib.sha256("".join(hashes[row] for row in rows).encode()).hexdigest()[:16] + how_many


def _first_rows(dataset: Any, seed: int, number: int) -> list[int]:
    """The rows that the first steps of a run read."""
    positions, order = np.arange(number), getattr(dataset, "order", None)
    of_own = None if order is None else order(positions, seed=seed)[0]
    rows: list[int] = (rows_at(positions, seed=seed, num_rows=len(dataset)) if of_own is None else of_own).tolist()
    return rows


def _hash_of_item(dataset: Any, row: int, seed: int, name: str) -> str:
    item = fetch_rows(dataset, [row], seed=seed, epochs=[0], step=1, collate=itemgetter(0), name=name)
    digest = hashlib.sha256()
    _add(digest, item)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Hash numbers, texts, tensors and arrays in whatever structure; of other objects the type alone."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        digest.update(f"{type(value).__name__} {value!r} ".encode())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(f"{key!r}: ".encode())
            _add(digest, each)
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)} ".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(fields := as_inputs(value), Mapping):
        _add(digest, fields)
    else:
        digest.update(type(value).__name__.encode())
