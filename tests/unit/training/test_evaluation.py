import pytest
import torch
from torch.utils.data import Dataset

import zerotrain
from zerotrain.models import GPT
from zerotrain.training.evaluation import evaluate, validation_rows


@pytest.fixture
def engine(model, world):
    return zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=world)


class RaggedSequences(Dataset):
    """Sequence i has only its first i + 1 labels counted."""

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
    losses = []
    with torch.no_grad():
        for ids, labels in (dataset[index] for index in range(7)):
            log_probabilities = engine.module(ids[None])[0].log_softmax(-1)
            losses += [-log_probabilities[t, label] for t, label in enumerate(labels.tolist()) if label != -100]
    loss = evaluate(engine=engine, world=world, dataset=dataset, num_sequences=100, micro_batch_size=micro_batch_size)
    assert len(losses) == 28
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_evaluating_changes_no_weight_and_leaves_the_engine_in_training(engine, world, dataset):
    before = engine.weights_sha256()
    evaluate(engine=engine, world=world, dataset=dataset.validation, num_sequences=8, micro_batch_size=4)
    assert engine.weights_sha256() == before
    assert engine.module.training


def test_dropout_is_off_while_evaluating(world, dataset):
    model = GPT(vocab_size=32, max_seq_len=16, num_layers=1, num_heads=1, hidden_size=8, dropout=0.9)
    engine = zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=world)
    arguments = {"engine": engine, "world": world, "dataset": dataset.validation}
    assert evaluate(**arguments, num_sequences=4, micro_batch_size=2) == evaluate(
        **arguments, num_sequences=4, micro_batch_size=2
    )


def test_the_sequences_read_are_spread_over_the_validation_set():
    assert validation_rows(100, 4) == [0, 25, 50, 75]
    assert validation_rows(3, 10) == [0, 1, 2]
    assert validation_rows(5, 3) == [0, 1, 3]


def test_a_validation_without_any_label_that_counts_is_nan_and_the_run_says_so(make_trainer, dataset, screen):
    dataset.validation = [(ids, torch.full_like(labels, -100)) for ids, labels in map(dataset.validation.__getitem__, (0, 1))]
    assert make_trainer(dataset=dataset, max_steps=2, eval_every=1).run()["final_val_loss"] is None
    assert screen.getvalue().count("no label of the validation counts") == 1
