"""Micro-batches, and a rank's share of the validation, in which no label counts: they reach no sum and no gradient."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerotrain
from tests.unit.training.runs import lines_in, trainer_of
from zerotrain.models import GPT
from zerotrain.testing.fake_wire import run_threads


class WithLoss(nn.Module):
    """A model whose loss is written as in docs/guides/own_model.md, or as the mean of masked losses."""

    def __init__(self, loss):
        super().__init__()
        self.gpt = GPT(vocab_size=32, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=16)
        self.loss = loss

    def forward(self, ids, labels=None):
        logits = self.gpt(ids)
        return logits if labels is None else self.loss(logits.float().flatten(0, 1), labels.flatten())


def masked_mean(logits, labels):
    counts = labels != -100
    return (F.cross_entropy(logits, labels.clamp(min=0), reduction="none") * counts).sum() / counts.sum()


class HalfOfThemWithout:
    """Sequences of which only those with an odd number have labels that count."""

    def __init__(self, num_sequences):
        tokens = torch.randint(32, (num_sequences, 9), generator=torch.Generator().manual_seed(1))
        self.train = [(row[:-1], row[1:] if i % 2 else torch.full((8,), -100)) for i, row in enumerate(tokens)]
        self.validation = self.train[:7]


def sum_over_threads(world, values):
    """`World.sum` where ranks are threads, which have no process group."""
    if world.size > 1:
        values.copy_(world.shards.make_wire(True).gather_small(values, "sum").sum(dim=0))
    return values


def run(world, folder, model):
    """Four steps of 6 sequences, one a micro-batch."""
    zero = zerotrain.ZeroConfig(stage=3, bucket_mb=0.01)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = zerotrain.build_engine(copy.deepcopy(model), optimizer=optimizer, zero=zero, world=world)
    size = {"micro_batch_size": 1, "gradient_accumulation_steps": 6 // world.size, "eval_batches": 10}
    return trainer_of(engine, folder, dataset=HalfOfThemWithout(24), **size).run()


@pytest.mark.case(
    "losses",
    "through the Trainer, in training and in validation, on 1, 2 and 3 ranks",
    "the same losses and norms",
    under=("A micro-batch without any label, its loss or its gradient nan; `weight=0` in `backward` and `train_step`"),
)
@pytest.mark.parametrize("loss", [F.cross_entropy, masked_mean], ids=["torch's mean", "masked mean"])
def test_any_number_of_ranks_trains_and_validates_alike_where_many_micro_batches_have_no_label(
    loss, tmp_path, monkeypatch
):
    monkeypatch.setattr(zerotrain.World, "sum", sum_over_threads)
    torch.manual_seed(0)
    model, lines = WithLoss(loss), {}
    for size in (1, 2, 3):
        results, _ = run_threads(partial(run, folder=tmp_path / str(size), model=model), size, late_rank=size - 1)
        assert {result["skipped_steps"] for result in results} == {0}
        shown = ("train_loss", "grad_norm", "val_loss")
        lines[size] = [line[name] for line in lines_in(tmp_path / str(size)) for name in shown if name in line]
    assert all(math.isfinite(number) for number in lines[1])
    assert lines[2] == pytest.approx(lines[1], rel=1e-5)
    assert lines[3] == pytest.approx(lines[1], rel=1e-5)
