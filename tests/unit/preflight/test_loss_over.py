"""A loss that is not the mean that `train.loss_over` says is refused before any rank starts."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.configs import ADAMW, CONSTANT, GPT
from tests.unit.data.tokenizers_made import saved
from tests.unit.training import losses
from tests.unit.training.losses import KINDS, NO_FIT, Kind
from zerotrain.config.schema import Config, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight, loss_trial

HERE = losses.__name__


def config_of(name: str, kind: Kind, loss_over: str, *, fits: bool = True) -> Config:
    data: dict[str, Any] = {"_target_": f"{HERE}.Rows", "kind": name, "fits": fits}
    if kind.collate is not None:
        data["collate_fn"] = {"_target_": f"{HERE}.{kind.collate.__name__}", "_partial_": True}
    model = {"_target_": f"{HERE}.{kind.model.__name__}"}
    return Config(
        model=model,
        data=data,
        optimizer=ADAMW,
        scheduler=CONSTANT,
        train=TrainConfig(max_steps=2, micro_batch_size=2, loss_over=loss_over),
    )


@pytest.mark.case(
    "losses",
    "A loss that is another mean than `train.loss_over` says, or a sum",
    "refused before any rank starts, with what fits, where the launcher can try it",
)
@pytest.mark.parametrize("name", KINDS)
def test_a_loss_that_is_the_mean_it_is_said_to_be_passes_and_another_is_refused_with_what_fits(name) -> None:
    kind, state = KINDS[name], torch.get_rng_state()
    preflight.check(config_of(name, kind, kind.loss_over))
    assert torch.equal(torch.get_rng_state(), state)
    preflight.check(config_of(name, kind, "micro_batches"))
    if kind.refused is not None:
        with pytest.raises(ConfigError, match=f"^train.loss_over: got {kind.refused}; .*{re.escape(kind.instead)}"):
            preflight.check(config_of(name, kind, kind.refused))


@pytest.mark.parametrize("name", NO_FIT)
def test_a_loss_that_no_weights_fit_is_refused_with_what_to_do(name) -> None:
    kind = NO_FIT[name]
    with pytest.raises(ConfigError, match=f"^train.loss_over: got auto; of 8 rows .*{re.escape(kind.instead)}"):
        preflight.check(config_of(name, kind, "auto", fits=False))
    preflight.check(config_of(name, kind, "micro_batches", fits=False))


@pytest.mark.parametrize(
    ("model", "collate"),
    [
        (losses.Tagger, losses.masked),
        (losses.Averaging, losses.cut),
        (losses.Drawing, None),
        (losses.Fails, None),
        (losses.WeighedCounts, losses.masked),
    ],
    ids=["collate draws", "padding matters", "the model draws", "it fails here", "its count after a draw"],
)
def test_what_cannot_be_tried_or_has_another_cause_is_not_refused(model, collate) -> None:
    preflight.check(config_of("labels", Kind(model, losses.ragged, collate=collate), "auto"))


@pytest.mark.parametrize(
    ("model", "collate", "loss_over", "problem"),
    [
        (losses.PerRow, losses.masked, "auto", r"of 8 rows .*; train\.loss_over=rows fits$"),
        (losses.Shifting, losses.cut, "auto", r"of 8 rows .*; train\.loss_over=shifted_labels fits$"),
        (losses.FromZero, None, "auto", r"of 8 rows .*; train\.loss_over=rows fits$"),
        (losses.Tagger, None, "model", r"Tagger has no method loss_count, which gets a batch as Tagger\.forward does"),
        (losses.Broken, None, "auto", r"loss_count returned -1\.0 for a batch; it must be a number from 0 on$"),
    ],
    ids=["collate draws", "padded to the longest", "a last layer of zeros", "no method", "a count below 0"],
)
def test_whatever_hides_the_weights_a_wrong_one_is_refused(model, collate, loss_over, problem) -> None:
    with pytest.raises(ConfigError, match=f"^train.loss_over: got {loss_over}; {problem}"):
        preflight.check(config_of("labels", Kind(model, losses.ragged, collate=collate), loss_over))


@pytest.mark.parametrize(
    ("model", "row"),
    [(losses.MaskedMean, losses.unlabelled), (losses.Narrow, losses.ragged)],
    ids=["nothing counts", "a loss of 8 bits"],
)
def test_what_weighs_nothing_or_is_rounded_is_not_refused(model, row, monkeypatch) -> None:
    monkeypatch.setitem(KINDS, "labels", Kind(model, row))
    preflight.check(config_of("labels", KINDS["labels"], "auto"))


@pytest.mark.parametrize("loss_over", ["labels", "rows"])
def test_where_nothing_fits_what_the_user_names_is_taken(loss_over) -> None:
    name = "a part of the batch"
    preflight.check(config_of(name, NO_FIT[name], loss_over, fits=False))


def test_a_first_part_without_labels_is_no_sum(monkeypatch) -> None:
    def row(number: int) -> tuple[torch.Tensor, ...]:
        return losses.ragged(number) if number > 2 else losses.unlabelled(number)

    monkeypatch.setitem(KINDS, "labels", Kind(losses.Zeroing, row))
    with pytest.raises(ConfigError, match=r"two parts of them; train\.loss_over=labels fits$"):
        preflight.check(config_of("labels", KINDS["labels"], "rows"))
    monkeypatch.setitem(KINDS, "labels", Kind(losses.Tagger, row))  # of no label it is nan
    with pytest.raises(ConfigError, match=r"nan by two parts of them; train\.loss_over=labels fits$"):
        preflight.check(config_of("labels", KINDS["labels"], "rows"))


def test_rows_of_classes_in_turn_are_not_all_of_one(monkeypatch) -> None:
    monkeypatch.setattr(losses, "ROWS", 4 * losses.ROWS)
    monkeypatch.setitem(KINDS, "labels", Kind(losses.Weighed, losses.in_turn))
    with pytest.raises(ConfigError, match="Weighed a method loss_count"):
        preflight.check(config_of("labels", KINDS["labels"], "auto"))


@pytest.mark.parametrize(("model", "kind"), [(losses.TwoNumbers, "tuple"), (losses.LogitsAlone, "Tensor of shape")])
def test_a_model_that_gives_an_evaluation_no_loss_is_refused(model, kind, monkeypatch) -> None:
    settings = config_of("labels", Kind(model, losses.ragged), "auto")
    with pytest.raises(ConfigError, match=f"^model: {model.__name__}.forward returns a {kind}.* the mean loss, "):
        preflight.check(settings)
    monkeypatch.setitem(settings.data, "validates", False)
    preflight.check(settings)


def test_a_loss_beside_outputs_is_tried_as_one_alone() -> None:
    preflight.check(config_of("labels", Kind(losses.WithLogits, losses.ragged), "auto"))
    with pytest.raises(ConfigError, match=r"train\.loss_over: got rows; .* train\.loss_over=labels fits"):
        preflight.check(config_of("rows", Kind(losses.WithLogits, losses.ragged), "rows"))


def test_a_model_of_zerotrain_or_a_large_one_is_not_built_for_it(monkeypatch) -> None:
    monkeypatch.setattr(loss_trial, "_losses", lambda *_: pytest.fail("a model was built"))
    preflight.check(replace(config_of("labels", KINDS["labels"], "auto"), model=GPT))
    monkeypatch.setattr(loss_trial, "MOST_NUMEL", 100)
    preflight.check(config_of("rows", KINDS["rows"], "auto"))


@pytest.mark.case(
    "data: Chats", "packing with a model whose attention crosses the borders", "refused before any rank starts"
)
@pytest.mark.parametrize(
    ("model_type", "says"), [("llama", ""), ("bloom", "data.pack: got true, but in HuggingFaceModel")]
)
def test_a_model_in_which_packed_chats_see_each_other_is_refused(tmp_path, model_type: str, says: str) -> None:
    """Bloom has no positions, and takes position_ids without a word."""
    tokenizer, path = saved("bytes, GPT-2", tmp_path, eos_token="<|endoftext|>"), tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "Hi", "completion": "Ho"}\n' * 40)
    data = {"path": str(path), "tokenizer": tokenizer, "template": "chatml", "pack": True, "seq_len": 128}
    data |= {"_target_": "zerotrain.data.ChatDataset", "cache_dir": str(tmp_path)}
    fields = {"model_type": model_type, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = {"_target_": "zerotrain.models.HuggingFaceModel", "config": fields, "vocab_size": 600}
    config = Config(model=model, data=data, optimizer=ADAMW, scheduler=CONSTANT, train=TrainConfig(max_steps=2))
    if not says:
        preflight.check(config)
        return
    with pytest.raises(ConfigError, match=f"^{says} packed examples see each other: the loss of a row is "):
        preflight.check(config)
