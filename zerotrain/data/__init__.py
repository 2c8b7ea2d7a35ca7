"""Plain map-style datasets of (ids, labels), and the order of reading them.

A dataset has `train` and `validation`; each item of those is a pair of int64 tensors of `seq_len` tokens, where
labels[t] is the token that follows ids[t], or -100 where there is none to learn. To add one, write a class with these
two attributes. More make it better served:

* `tokens_per_sequence` on `train` and `validation`: the number of labels that count in each of their items, where it
  is the same in all. Without it the ranks must tell each other what they read in every step.
* `rows(indices) -> batch` on `train` and `validation` in place of one item after the other, which may pad rows of
  different lengths; then `longest_row`, the number of the row that takes the most memory, is planned with.
* `decode(ids) -> text`: with it a run ends with a sample of generated text. `encode(text) -> ids` lets a user choose
  how it begins, and `end_of_text`, a token, where it stops.
"""
# ruff: noqa: F401 -- the names are for others

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotrain.data.batches import GlobalBatchSampler
    from zerotrain.data.chat import ChatDataset
    from zerotrain.data.datasets import TextDataset, TokenFiles
    from zerotrain.data.huggingface import HuggingFaceDataset
    from zerotrain.data.mix import Mix
    from zerotrain.data.synthetic import SyntheticTokens

_HOMES = {
    "ChatDataset": "chat",
    "GlobalBatchSampler": "batches",
    "HuggingFaceDataset": "huggingface",
    "Mix": "mix",
    "SyntheticTokens": "synthetic",
    "TextDataset": "datasets",
    "TokenFiles": "datasets",
}
"""The modules of the names. A run imports the one of its dataset."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'zerotrain.data' has no attribute {name!r}")
    return getattr(import_module(f"zerotrain.data.{_HOMES[name]}"), name)
