"""Metrics of evaluations on several ranks: the digits of one process."""

import math
from functools import partial

import pytest
import torch
from cases import run_over
from torch.utils.data import Dataset

import zerotrain
from tests.unit.training.metrics.test_metric import CLASSES
from zerotrain.comm.world import World
from zerotrain.models import GPT
from zerotrain.training import Accuracy, Metric, Perplexity, TorchMetric
from zerotrain.training.callbacks.evaluation import evaluate_all

torchmetrics = pytest.importorskip("torchmetrics")
PER_MICRO_BATCH, ROWS = 2, 7


class Ragged(Dataset):
    """Sequence i counts its first i labels alone; the first one has none."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        tokens = torch.randint(CLASSES, (17,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[index:] = -100
        return tokens[:-1], labels


class Confidence(torchmetrics.Metric):
    """Sums of numbers of all sizes, whose digits depend on the order, and states of every kind."""

    higher_is_better = True

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("largest", torch.full((2,), -math.inf), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(math.inf), dist_reduce_fx="min")
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("small", torch.tensor(0, dtype=torch.uint8), dist_reduce_fx="max")

    def update(self, preds, target):
        values = preds.gather(1, target[:, None]).exp()[:, 0]
        self.total += values.sum() * 10.0 ** (len(target) % 5)
        self.count += len(target)
        self.largest = torch.maximum(self.largest, values.max())
        self.least = torch.minimum(self.least, values.min())
        if len(target) % 2:  # else there is nothing of this micro-batch
            self.seen.append(values[0])
        self.small = self.small.maximum(target.max().to(torch.uint8))

    def compute(self):
        seen = torch.cat([torch.atleast_1d(each) for each in self.seen]) if isinstance(self.seen, list) else self.seen
        weights = torch.arange(1, len(seen) + 1)  # their order matters
        return self.total / self.count + self.largest.sum() + self.least + (seen * weights).sum() + self.small


MADE = {
    "confidence": Confidence,
    "f1": partial(torchmetrics.classification.MulticlassF1Score, CLASSES),
    "auroc": partial(torchmetrics.classification.MulticlassAUROC, CLASSES),
}


def model_of() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=CLASSES, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=32)


def in_one_process() -> dict[str, float]:
    """What plain torchmetrics and plain PyTorch come to, micro-batch by micro-batch."""
    model, rows, plain = model_of().eval(), Ragged(), {name: make() for name, make in MADE.items()}
    right = total = 0
    with torch.no_grad():
        for first in range(0, ROWS, PER_MICRO_BATCH):
            batch = [rows[row] for row in range(first, min(first + PER_MICRO_BATCH, ROWS))]
            ids, labels = (torch.stack(each) for each in zip(*batch, strict=True))
            logits, counts = model(ids), labels != -100
            right += int((logits.argmax(-1) == labels)[counts].sum())
            total += int(counts.sum())
            for metric in plain.values():
                metric.update(logits[counts], labels[counts])
    return {f"val_{name}": float(each.compute()) for name, each in plain.items()} | {"val_accuracy": right / total}


def on_a_rank(stage: int) -> dict[str, float]:
    world = World.current(torch.device("cpu"))
    model = model_of()
    engine = zerotrain.build_engine(
        model, optimizer=torch.optim.SGD, zero=zerotrain.ZeroConfig(stage, bucket_mb=0.01), world=world
    )
    metrics: dict[str, Metric] = {name: TorchMetric(make(), higher_is_better=True) for name, make in MADE.items()}
    metrics |= {"accuracy": Accuracy(), "perplexity": Perplexity()}
    return evaluate_all(
        engine=engine, world=world, dataset=Ragged(), num_sequences=100, micro_batch_size=PER_MICRO_BATCH,
        metrics=metrics,
    )  # fmt: skip


@pytest.mark.case(
    "losses",
    "Metrics of an evaluation: accuracy, those of torchmetrics whose states are summed, joined, largest or smallest",
    "the digits of one process on 1, 2 and 3 ranks, at stages 0 and 3, also where a rank has no row left",
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.thinned(3, first=2)
def test_metrics_are_those_of_one_process_to_the_last_digit(size: int) -> None:
    wanted = in_one_process()
    for stage, by_rank in zip((0, 3), run_over([0, 3], on_a_rank, size), strict=True):
        for found in by_rank:
            assert found.pop("val_perplexity") == math.exp(found.pop("val_loss")), stage
            assert found == wanted, stage
