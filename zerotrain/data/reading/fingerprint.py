"""The identity of a dataset, in a few numbers and texts that ranks compare, and a resumed run."""

import hashlib
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from zerotrain.data.reading.batches import OF_SET
from zerotrain.data.reading.fetch import fetch_rows
from zerotrain.data.reading.inputs import as_inputs

Fingerprint = dict[str, int | str]
_NUM_ORDERED = 1000
"""First rows of an order of the dataset's own, such as that of a mix, which its weights change."""


def fingerprint_of(data: Any, seed: int = 0, validation_sets: Mapping[str, Any] | None = None) -> Fingerprint:
    """Equal where the rows of `data.train` and `data.validation` are equal, as far as can be told without reading all.

    Args:
        data: its own `fingerprint()` is taken where it has one. Else some items are read: the first, the middle and the
            last of each dataset.
        seed: of the run, which what is drawn for an item follows from.
        validation_sets: further data by name, whose fingerprints are in it too, behind `OF_SET` and the name.

    Raises:
        RowError: an item could not be read.
    """
    known = _of_one(data, seed, "data")
    for name, each in (validation_sets or {}).items():
        of_set = _of_one(each, seed, f"data.validation_sets.{name}")
        known |= {f"{OF_SET}{name}.{what}": value for what, value in of_set.items()}
    return known


def _of_one(data: Any, seed: int, called: str) -> Fingerprint:
    known: Fingerprint = {"rows": len(data.train), "validation_rows": len(data.validation)}
    if hasattr(data.train, "order"):
        first_rows, _ = data.train.order(np.arange(_NUM_ORDERED), seed=seed)
        known["order"] = hashlib.sha256(first_rows.astype("<i8").tobytes()).hexdigest()[:16]
    if callable(getattr(data, "fingerprint", None)):
        # What was wrapped since may have other rows than the dataset itself knows of.
        return {str(name): value for name, value in data.fingerprint().items()} | known
    for name in ("train", "validation"):
        rows = sorted({0, len(dataset := getattr(data, name)) // 2, len(dataset) - 1})
        if not len(dataset):
            continue
        hashes = [_hash_of_item(dataset, row, seed, f"{called}.{name}") for row in [*rows, rows[0]]]
        same_again = hashes[0] == hashes.pop()
        said = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if same_again else "never the same"
        known[f"items_of_{name}"] = said
    return known


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
