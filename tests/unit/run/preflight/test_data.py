"""Users' datasets: what is refused before any rank starts, each in one line, and what is taken."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.unit.run.test_factory import ADAMW, GPT
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight
from zerotrain.preflight.check import require_callbacks_fit

CONSTANT = {"_target_": "zerotrain.training.constant", "_partial_": True}


class Items:
    """A dataset of the same items on both sides."""

    def __init__(self, kind: str = "pairs", seq_len: int = 16) -> None:
        tokens = torch.arange(seq_len + 1)
        pair = (tokens[:-1], tokens[1:])
        kinds: dict[str, Any] = {
            "pairs": [pair] * 4,
            "dicts": [{"labels": pair[1], "ids": pair[0]}] * 4,
            "stream": Stream(),
            "no length": NoLength(),
            "empty": [],
            "strings": ["text"],
            "lists": [(pair[0].tolist(), pair[1].tolist())],
            "triples": [(*pair, pair[0])],
            "single": [pair[0]],
            "int32": [(pair[0], pair[1].int())],
            "unequal": [(pair[0], pair[1][:-1])],
            "unknown": [(pair[0], pair[1] + 1000)],
            "unknown in the second": [pair, (pair[0], pair[1] + 1000)],
            "ragged": [pair, (pair[0][:8], pair[1][:8])],
            "failing": Failing(),
        }
        self.train = kinds[kind]
        self.validation = kinds["pairs"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.arange(16), torch.arange(1, 17)


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {}["image"]


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    """Pads to the longest item; the labels that are added do not count."""
    ids, labels = zip(*items, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return {"ids": pad(ids, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100)}


def check(kind: str, **settings: Any) -> None:
    data = {"_target_": f"{__name__}.Items", "kind": kind, **settings}
    preflight.check(Config(model=GPT, data=data, optimizer=ADAMW, scheduler=CONSTANT))


@pytest.mark.case(
    "losses",
    "An `IterableDataset`, no `len()`, an empty dataset, strings, lists of numbers, items of "
    "several shapes without a collate function",
)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("stream", "data.train is of type Stream, which cannot be indexed; it must be map-style"),
        ("no length", "data.train is of type NoLength, which cannot be indexed"),
        ("empty", "data.train is empty"),
        ("strings", "data.train[0] is of type str; a batch is made of tensors and numbers"),
        ("lists", "data.train[0][0] is a list of numbers; give torch.tensor"),
        ("triples", "data.train[0] gives 3 parts without names, but GPT.forward takes (ids, labels): "),
        ("single", "data.train[0] gives 1 part without names and no labels, but GPT.forward takes (ids, labels)"),
        ("int32", "data.train[0] has int64 (16,) for ids and int32 (16,) for labels; GPT takes int64"),
        ("unequal", "data.train[0] has int64 (16,) for ids and int64 (15,) for labels"),
        ("unknown", "data.train[0] has the token 1001, but GPT knows the tokens from 0 to 255"),
        ("unknown in the second", "data.train[1] has the token 1001, but GPT knows the tokens from 0 to 255"),
        ("ragged", "data.train[1] has shapes [0] (8,), [1] (8,) and data.train[0] shapes [0] (16,), [1] (16,)"),
        ("failing", f"data.train: row 0 (epoch 0, step 1) cannot be read: KeyError: 'image' ({__file__}, line "),
    ],
)
def test_items_that_cannot_be_trained_on_are_refused_in_one_line(kind: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(kind)
    [line] = refused.value.problems
    assert line.startswith(problem)
    assert "\n" not in line


@pytest.mark.case("losses", "Items of several lengths with `data.collate_fn`")
def test_items_that_are_named_or_that_a_collate_function_pads_are_taken() -> None:
    check("dicts")
    check("ragged", collate_fn={"_target_": f"{__name__}.padded", "_partial_": True})
    with pytest.raises(ConfigError, match=r"^data\.train: row 0 .* cannot be collated into a batch: ValueError: too"):
        check("triples", collate_fn={"_target_": f"{__name__}.padded", "_partial_": True})


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        ("val_accuracy/b", None),
        ("val_accuracy", None),
        (
            "val_f1",
            "checkpoint.best: got val_f1; an evaluation has val_loss, val_accuracy, val_loss/a, val_loss/b, val_a",
        ),
        (None, None),
        ("val_loss", None),
        ("val_loss/a", None),
        (
            "val_loss/c",
            "checkpoint.best: got val_loss/c; an evaluation has val_loss, val_accuracy, val_loss/a, val_loss/b",
        ),
    ],
)
def test_the_best_is_of_a_loss_that_an_evaluation_has(best: str | None, problem: str | None) -> None:
    data = SimpleNamespace(validation=SimpleNamespace(sources={"a": [], "b": []}))
    accuracy = {"_target_": "zerotrain.training.Accuracy"}
    settings = Config(checkpoint=CheckpointConfig(best=best), callbacks={"accuracy": accuracy})
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        require_callbacks_fit(data, {}, settings)
    if best is not None:  # of jobs that are compared by it likewise
        settings.checkpoint.best, settings.sweep.objective = None, best
        said = None if problem is None else problem.replace("checkpoint.best", "sweep.objective")
        with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
            require_callbacks_fit(data, {}, settings)


class Named(torch.nn.Linear):
    """Regression of dicts."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, features: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        outputs = super().forward(features).squeeze(-1)
        return outputs if target is None else (outputs - target).square().mean()


class AlwaysLoss(Named):
    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(features, target)


class Square(torch.nn.Module):
    """As many classes as positions, in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        outputs = self.embedding(ids).transpose(1, 2)
        return outputs if labels is None else torch.nn.functional.cross_entropy(outputs, labels)


class Table:
    def __init__(self, kind: str = "named") -> None:
        x, ids = torch.ones(3), torch.tensor([0, 1, 2, 3])
        rows = {
            "named": {"features": x, "target": x.sum()},
            "nested": {"features": {"x": x, "y": x.sum()}, "target": x.sum()},
            "single": x,
            "square": (ids, ids),
        }
        self.train = self.validation = [rows[kind]] * 4


R2 = {"_target_": "zerotrain.training.TorchMetric", "metric": {"_target_": "torchmetrics.R2Score"}}


@pytest.mark.case(
    "losses",
    "A metric whose labels or `target` no batch has, or that cannot know which dimension has the classes",
    "refused before any rank starts, with the names that there are",
)
@pytest.mark.parametrize(
    ("model", "kind", "metric", "problem"),
    [
        (
            "Named",
            "named",
            R2,
            "compares outputs with labels, and a batch of data.validation has features, target; give",
        ),
        ("Named", "named", R2 | {"target": "target"}, None),
        (
            "Named",
            "named",
            R2 | {"target": "tarqet"},
            "compares outputs with tarqet, and a batch of data.validation has f",
        ),
        (
            "Named",
            "nested",
            R2 | {"target": "features.z"},
            "with features.z, .* has features.x, features.y, target; give",
        ),
        (
            "Named",
            "single",
            R2,
            "compares outputs with labels, and a batch of data.validation has no such part; give d",
        ),
        (
            "AlwaysLoss",
            "named",
            R2 | {"target": "target"},
            "calls AlwaysLoss.forward without labels for its outputs: mis",
        ),
        (
            "Square",
            "square",
            {"_target_": "zerotrain.training.Accuracy"},
            "classes of outputs of shape .1, 4, 4. may be",
        ),
        ("Square", "square", {"_target_": "zerotrain.training.Accuracy", "class_dim": 1}, None),
    ],
)
def test_a_metric_without_its_labels_is_refused_before_any_rank_starts(model, kind, metric, problem) -> None:
    pytest.importorskip("torchmetrics")
    settings = Config(
        model={"_target_": f"{__name__}.{model}"},
        data={"_target_": f"{__name__}.Table", "kind": kind},
        optimizer=ADAMW,
        scheduler=CONSTANT,
        callbacks={"mine": metric},
    )
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=rf"^callbacks\.mine: .*{problem}"):
        preflight.check(settings)
