"""Names of a file that are not the model's own: read by one word before them, or not at all."""

from pathlib import Path

import torch

from zerotrain.checkpoint.others.stored_weights import StoredTensor
from zerotrain.engine.state.from_weights import Wanted, match


def given(name: str) -> StoredTensor:
    return StoredTensor([name], "F32", torch.float32, (2,), (1,), None)


def test_where_two_words_would_make_names_fit_none_is_taken() -> None:
    wanted = [Wanted([name], torch.zeros(2)) for name in ("model.inner.weight", "model.inner.inner.weight")]
    loaded = match(Path("file"), [given("inner.weight")], wanted)
    assert loaded.surplus == ("inner.weight",)
    assert loaded.missing == ("model.inner.weight", "model.inner.inner.weight")
    assert loaded.renamed == ""
    assert not any(each.given for each in wanted)


def test_where_one_word_makes_names_fit_it_is_taken() -> None:
    wanted = [Wanted([name], torch.zeros(2)) for name in ("model.inner.weight", "model.inner.bias")]
    tensors = [given("inner.weight"), given("inner.bias")]
    assert match(Path("file"), tensors, wanted).num_loaded == 2
    assert [each.given[0][1] for each in wanted] == tensors
