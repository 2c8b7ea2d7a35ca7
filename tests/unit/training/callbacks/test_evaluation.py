import math
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.training import losses
from zerotrain.data import Mix, SyntheticTokens
from zerotrain.data.fetch import RowError
from zerotrain.errors import ConfigError
from zerotrain.models import GPT
from zerotrain.training import Accuracy
from zerotrain.training.callbacks.evaluation import (
    evaluate_all,
    evaluate_sources,
    sources_in,
    validation_rows,
)


def evaluate(**arguments):
    return evaluate_all(**arguments)["val_loss"]


@pytest.fixture
def engine(model, world):
    return zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=world)


class RaggedSequences(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        tokens = torch.randint(32, (17,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[index + 1 :] = -100
        return tokens[:-1], labels


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 7, 20])
def test_the_loss_is_the_mean_over_all_tokens_not_a_mean_of_means(engine, world, micro_batch_size):
    dataset = RaggedSequences()
    of_each = []
    with torch.no_grad():
        for ids, labels in (dataset[index] for index in range(7)):
            log_probabilities = engine.module(ids[None])[0].log_softmax(-1)
            of_each += [-log_probabilities[t, label] for t, label in enumerate(labels.tolist()) if label != -100]
    loss = evaluate(engine=engine, world=world, dataset=dataset, num_sequences=100, micro_batch_size=micro_batch_size)
    assert len(of_each) == 28
    assert loss == pytest.approx(torch.stack(of_each).mean().item(), rel=1e-5)


def test_a_model_without_a_loss_in_evaluation_mode_is_refused_by_name(world):
    engine = zerotrain.build_engine(losses.LogitsAlone(), optimizer=torch.optim.SGD, world=world)
    rows = losses.Rows("labels").validation
    with pytest.raises(ConfigError, match=r"^model: LogitsAlone.forward returns a Tensor of shape \(2, 6,"):
        evaluate(engine=engine, world=world, dataset=rows, num_sequences=4, micro_batch_size=2)
    assert engine.module.training


def test_the_sequences_read_are_spread_over_the_validation_set():
    assert validation_rows(100, 4) == [0, 25, 50, 75]
    assert validation_rows(3, 10) == [0, 1, 2]
    assert validation_rows(5, 3) == [0, 1, 3]


@pytest.mark.case("losses", "A validation without any label", "nan, and a warning")
def test_a_validation_without_any_label_that_counts_is_nan_and_the_run_says_so(make_trainer, dataset, screen):
    dataset.validation = [
        (ids, torch.full_like(labels, -100)) for ids, labels in map(dataset.validation.__getitem__, (0, 1))
    ]
    assert make_trainer(dataset=dataset, max_steps=2, eval_every=1).run()["final_val_loss"] is None
    assert screen.getvalue().count("all validation labels are ignored") == 1


class DrawsEverywhere(torch.nn.Module):
    """Dropout in training, and random numbers in evaluation too."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT(vocab_size=32, max_seq_len=16, num_layers=1, num_heads=2, hidden_size=16, dropout=0.3)

    def forward(self, ids, labels=None):
        return self.gpt(ids, labels) + 0.01 * torch.randn(())


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}


class OwnPretrained(torch.nn.Module):
    """What a user writes around `from_pretrained`, which gives evaluation mode."""

    def __init__(self, folder):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, resid_pdrop=0.3)).save_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def forward(self, ids, labels=None):
        logits = self.model(input_ids=ids).logits
        return logits if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.case(
    "losses",
    "`train.eval_every` 0, 1 or 3, with dropout, a model that comes in evaluation mode, or random "
    "numbers in evaluation",
    "same weights",
)
@pytest.mark.parametrize("make", [lambda _: DrawsEverywhere().eval(), OwnPretrained])
def test_how_often_one_evaluates_changes_no_weight_of_a_model_that_draws_random_numbers(make, make_trainer, tmp_path):
    def weights(eval_every, dropout=True):
        torch.manual_seed(0)
        model = make(tmp_path)
        if not dropout:
            for module in model.modules():
                module.p = 0.0
        torch.manual_seed(1)
        engine = zerotrain.build_engine(model, optimizer=partial(torch.optim.SGD, lr=0.1))
        return make_trainer(engine=engine, max_steps=6, eval_every=eval_every).run()["weights_sha256"]

    assert weights(0) == weights(1) == weights(3) != weights(0, dropout=False)


class OnFrozenBackbone(torch.nn.Module):
    """A head behind a frozen backbone, whose batch norm is to stay as it was learnt."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, pixels, labels):
        return (self.head(self.backbone(pixels)).squeeze(-1) - labels).square().mean()


@pytest.mark.case("losses", "Modules that the user left in evaluation mode", "stay there after an evaluation")
def test_modules_that_the_user_put_into_evaluation_mode_stay_there(world):
    engine = zerotrain.build_engine(OnFrozenBackbone(), optimizer=torch.optim.SGD, world=world)
    engine.train()
    engine.module.backbone.eval()
    items = [{"pixels": torch.full((4,), float(row)), "labels": float(row)} for row in range(5)]
    loss = evaluate(engine=engine, world=world, dataset=items, num_sequences=5, micro_batch_size=2)
    assert math.isfinite(loss)
    assert (engine.module.training, engine.module.head.training) == (True, True)
    assert not any(module.training for module in engine.module.backbone.modules())


class Augmenting(RaggedSequences):
    """Draws a mask for each item from torch's global generator."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        return ids, labels.masked_fill(torch.rand(labels.shape) < 0.5, -100)


def test_what_validation_draws_depends_on_no_micro_batch_size_and_on_nothing_drawn_before(engine, world):
    found = set()
    for micro_batch_size in (1, 2, 7):
        torch.manual_seed(micro_batch_size)
        arguments = {"num_sequences": 7, "micro_batch_size": micro_batch_size, "seed": 5}
        found.add(round(evaluate(engine=engine, world=world, dataset=Augmenting(), **arguments), 5))
    assert len(found) == 1


@pytest.mark.case(
    "losses",
    "Items of several lengths with `data.collate_fn`",
    "each micro-batch put together apart; the loss equals that of items cut by hand",
)
def test_named_items_of_several_lengths_have_the_same_loss_as_pairs(engine, world):
    def padded(items):
        ids, labels = zip(*items, strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        return {"labels": pad(labels, batch_first=True, padding_value=-100), "ids": pad(ids, batch_first=True)}

    rows = [RaggedSequences()[row] for row in range(7)]
    cut = [(ids[: row + 1], labels[: row + 1]) for row, (ids, labels) in enumerate(rows)]
    arguments = {"engine": engine, "world": world, "num_sequences": 7, "micro_batch_size": 3}
    loss = evaluate(dataset=rows, **arguments)
    assert evaluate(dataset=cut, collate=padded, **arguments) == pytest.approx(loss, rel=1e-5)
    with pytest.raises(RowError, match=r"^data\.validation: rows 0, 1, 2 \(epoch 0, step 0\) cannot be collated"):
        evaluate(dataset=cut, **arguments)


@pytest.mark.case("losses", "Validation of a mix", "a loss of each source; `val_loss` is their mean by weights")
def test_each_source_of_a_mix_has_its_numbers_and_their_mean_by_weights_is_that_of_the_mix(engine, world, dataset):
    other = SyntheticTokens(seq_len=16, vocab_size=32, num_sequences=40)
    mix = Mix(
        {"a": {"data": dataset, "weight": 3}, "b": {"data": other, "weight": 1}, "c": {"data": other, "weight": 0}}
    )
    arguments = {"engine": engine, "world": world, "micro_batch_size": 4, "metrics": {"accuracy": Accuracy()}}
    found = evaluate_sources(dataset=mix.validation, num_sequences=16, **arguments)
    alone = evaluate_all(dataset=dataset.validation, num_sequences=12, **arguments)
    others = evaluate_all(dataset=other.validation, num_sequences=4, **arguments)
    assert alone != others
    for name in ("val_loss", "val_accuracy"):
        assert (found[f"{name}/a"], found[f"{name}/b"]) == (alone[name], others[name])
        assert found[name] == pytest.approx((3 * alone[name] + others[name]) / 4)
    assert sources_in(found).keys() == {"a", "b", "c"}
    assert found["val_loss/c"] == evaluate_all(dataset=other.validation, num_sequences=1, **arguments)["val_loss"]
    assert evaluate_sources(dataset=dataset.validation, num_sequences=12, **arguments) == alone


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, inputs, labels=None):
        return (inputs * self.weight).mean()


class OfAllSizes(Dataset):
    """Values from 1e-9 to 1e9 of both signs, which no order but one adds up to the same bits; of item i some labels
    count, of item 0 none."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        values = torch.randn(4, generator=draws) * 10.0 ** torch.randint(-9, 10, (1,), generator=draws)
        return values, torch.where(torch.arange(4) < index % 5, 1, -100)


@pytest.mark.case(
    "checkpoints",
    "of losses of all sizes, on 1 to 5 ranks at stages 0 and 3",
    "added up in the order of the micro-batches",
    under=("`zerotrain evaluate RUN` of four ranks at stage 3 in bf16, on one process, or on three at stage 1"),
)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_loss_is_the_same_bits_at_any_number_of_ranks(stage, micro_batch_size):
    """Each rank's sum was added to those of the others: the last bits told how many there were (2026-11-22)."""
    items = [OfAllSizes()[row] for row in range(23)]
    loss_sum, total = 0.0, 0
    for first in range(0, 23, micro_batch_size):
        inputs, labels = (torch.stack(each) for each in zip(*items[first : first + micro_batch_size], strict=True))
        count = int((labels != -100).sum())
        loss_sum, total = loss_sum + Scaled()(inputs).item() * count, total + count

    def on_a_rank(world):
        zero = zerotrain.ZeroConfig(stage=stage)
        engine = zerotrain.build_engine(Scaled(), optimizer=torch.optim.SGD, zero=zero, world=world)
        arguments = {"num_sequences": 100, "micro_batch_size": micro_batch_size}
        return evaluate(engine=engine, world=world, dataset=OfAllSizes(), **arguments)

    for size in (1, 2, 3, 4, 5):
        assert set(run_threads(on_a_rank, size)[0]) == {loss_sum / total}


def test_all_rows_are_evaluated_where_all_are_asked_for(make_trainer, dataset, world) -> None:
    trainer = make_trainer(eval_batches="all", max_steps=1)
    assert len(dataset.validation) > 2 * 8
    loss = trainer.run()["final_val_loss"]
    arguments = {"engine": trainer.engine, "world": world, "dataset": dataset.validation, "micro_batch_size": 4}
    assert loss == evaluate(**arguments, num_sequences=len(dataset.validation))
    assert loss != evaluate(**arguments, num_sequences=16)
