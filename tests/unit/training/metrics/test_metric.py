"""Metrics of evaluations: the digits of one process, whatever the ranks, and what cannot be so is refused."""

import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zerotrain
from tests.unit.training.runs import lines_in
from zerotrain.errors import CallbackError
from zerotrain.training import Accuracy, Metric, Perplexity, TorchMetric
from zerotrain.training.callbacks.evaluation import evaluate_all
from zerotrain.training.metrics.metric import MetricStates, is_metrics_state

torchmetrics = pytest.importorskip("torchmetrics")
CLASSES = 32


def f1():
    return torchmetrics.classification.MulticlassF1Score(CLASSES)


def test_where_no_label_counts_a_metric_is_nan(model, world) -> None:
    engine = zerotrain.build_engine(model, optimizer=torch.optim.SGD, world=world)
    rows = [(torch.arange(16), torch.full((16,), -100))] * 3
    metrics = {"accuracy": Accuracy(), "f1": TorchMetric(f1()), "perplexity": Perplexity()}
    arguments = {"engine": engine, "world": world, "dataset": rows, "num_sequences": 3, "micro_batch_size": 2}
    found = evaluate_all(**arguments, metrics=metrics)
    assert len(found) == 4
    assert all(map(math.isnan, found.values()))


def test_a_run_logs_its_metrics_and_trains_to_the_same_weights(make_trainer, model, screen, tmp_path) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = make_trainer(eval_every=2).run()
    model.load_state_dict(start)
    callbacks = {"accuracy": Accuracy(), "perplexity": Perplexity(), "f1": TorchMetric(f1()), "loss_top": Accuracy()}
    result = make_trainer(eval_every=2, callbacks=callbacks).run()
    assert result["weights_sha256"] == plain["weights_sha256"]
    assert result["final_val_loss"] == plain["final_val_loss"]
    told = lines_in(tmp_path, "val_loss")[-1]
    assert told["val_perplexity"] == math.exp(told["val_loss"])
    assert 0 < told["val_accuracy"] <= 1
    names = ("val_accuracy", "val_perplexity", "val_f1", "val_loss_top")
    assert result["val_metrics"] == {name: told[name] for name in names}
    assert plain["val_metrics"] is None
    assert f"accuracy {told['val_accuracy']:.4g}, perplexity {told['val_perplexity']:.4g}, f1" in " ".join(
        screen.getvalue().split()
    )


class Raises(Metric):
    def measure(self, outputs, labels):
        raise RuntimeError("no such thing")


class Complex(Metric):
    def measure(self, outputs, labels):
        return [torch.zeros(1, dtype=torch.complex64)]


class Unlabelled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids, labels=None):
        return self.weight * ids.float().mean()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Raises, r"callbacks\.bad: evaluation after step 0: RuntimeError: no such thing"),
        (Complex, r"callbacks\.bad: .* it keeps a 1-dimensional tensor of torch.complex64"),
    ],
)
def test_a_metric_that_fails_is_named(make_trainer, bad: type, said: str) -> None:
    with pytest.raises(CallbackError, match=said):
        make_trainer(eval_every=2, callbacks={"bad": bad()}).run()


def test_a_metric_without_labels_is_named(make_trainer, world) -> None:
    engine = zerotrain.build_engine(Unlabelled(), optimizer=torch.optim.SGD, world=world)
    with pytest.raises(CallbackError, match=r"callbacks\.accuracy: .* accuracy needs labels, and outputs with the cl"):
        make_trainer(engine=engine, eval_every=2, callbacks={"accuracy": Accuracy()}).run()


def test_perplexity_of_training_needs_no_outputs_of_the_model(make_trainer, tmp_path) -> None:
    engine = zerotrain.build_engine(Unlabelled(), optimizer=torch.optim.SGD)
    make_trainer(engine=engine, callbacks={"perplexity": Perplexity(of=["training"])}).run()
    told = lines_in(tmp_path, "train_loss")
    assert [line["train_perplexity"] for line in told] == [math.exp(line["train_loss"]) for line in told]


class Mean(torchmetrics.Metric):
    higher_is_better = True

    def __init__(self, default=0.0, reduction="mean"):
        super().__init__()
        self.add_state("mean", torch.tensor(default), dist_reduce_fx=reduction)

    def update(self, preds, target): ...

    def compute(self): ...


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (object(), "object has not the interface of torchmetrics.Metric"),
        (torchmetrics.MeanMetric(), "does not say whether higher is better; give higher_is_better"),
        (Mean(), "Mean reduces its state mean by dim_zero_mean; it must be sum from 0, max, min or cat"),
        (Mean(reduction=None), "by nothing; it must be"),
        (Mean(1.0, "sum"), "by dim_zero_sum; it must be sum from 0"),
    ],
    ids=["no metric", "no direction", "a mean", "no reduction", "a sum from 1"],
)
def test_what_cannot_be_the_same_on_any_number_of_ranks_is_refused(metric, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        TorchMetric(metric)


def test_what_a_checkpoint_says_of_metrics_of_training_is_looked_at_before_it_is_used() -> None:
    states = MetricStates({"accuracy": Accuracy()}, "train_", "training")
    states.add(3, torch.tensor(1.5), 2, torch.eye(3)[None, :2], (None, torch.tensor([[0, 2]])), 2)
    told = json.loads(json.dumps({"num": 4, "kept": states.state_dict()}))
    assert is_metrics_state(told)
    again = MetricStates({"accuracy": Accuracy()}, "train_", "training")
    again.load_state_dict(told["kept"], torch.device("cpu"))
    assert again.state_dict() == states.state_dict()
    kept = told["kept"]
    for wrong in (
        None, [], {"num": 4}, {"num": 3, "kept": kept}, {"num": 4, "kept": [kept]},
        {"num": 4, "kept": {"loss": {"x": kept["loss"]["3"]}}}, {"num": 4, "kept": {"loss": {"-1": kept["loss"]["3"]}}},
        {"num": 4, "kept": {"loss": {"3": []}}}, {"num": 4, "kept": {"loss": {"3": [[6, [3], [1, 2, 3]]]}}},
        {"num": 4, "kept": {"a": {"3": [[99, [1], [1]]]}}}, {"num": 4, "kept": {"a": {"3": [[0, [1 << 50], [1]]]}}},
        {"num": 4, "kept": {"a": {"3": [[0, [1], [2**70]]]}}}, {"num": 4, "kept": {"a": {"3": [[0, [1], ["x"]]]}}},
        {"num": 4, "kept": {"a": {"3": [[0, [1] * 9, [1]]]}}}, {"num": 4, "kept": {"a": {"3": [[0, [1]]]}}},
    ):  # fmt: skip
        assert not is_metrics_state(wrong), wrong


class Waits(TorchDispatchMode):
    """Notes the operations whose result or its size the host has to know, for which it waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"):
            self.seen.append(str(func))
        if "index" in str(func) and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_measuring_a_micro_batch_waits_for_no_device() -> None:
    labels = torch.tensor([[0, 1], [-100, 1]])
    states = MetricStates({"accuracy": Accuracy(), "perplexity": Perplexity()}, "train_", "training")
    outputs, loss = torch.eye(3)[torch.tensor([[0, 1], [1, 2]])], torch.tensor(0.5, dtype=torch.float64)
    with Waits() as waits:
        states.add(0, loss, 2, outputs, (None, labels), 3)
    assert not waits.seen
    assert states.state_dict()["accuracy"]["0"] == [[0, [], [2]], [0, [], [3]]]
    with Waits() as waits:
        outputs[labels != -100].sum().item()
    assert len(waits.seen) >= 2


# ---- which dimension has the classes, and what the outputs are compared with


class Given(torch.nn.Module):
    """Gives the outputs that stand in the batch, and 0 for a loss."""

    def __init__(self, *, next_token_labels: bool = False):
        super().__init__()
        self.weight, self.next_token_labels = torch.nn.Parameter(torch.zeros(1)), next_token_labels

    def forward(self, outputs, labels=None):
        return outputs if labels is None else self.weight.sum() * 0


def right_in(outputs: torch.Tensor, labels: torch.Tensor, dim: int) -> float:
    right = (outputs.argmax(dim=dim) == labels)[labels != -100]
    return right.sum().item() / right.numel()


def classified(shape: tuple[int, ...], num_classes: int, dtype=torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and labels of the other dimensions than 1, of which signed ones are ignored here and there."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (shape[0], *shape[2:]), generator=generator)
    if dtype != torch.uint8:
        labels.flatten()[::5] = -100
    return torch.randn(shape, generator=generator), labels.to(dtype)


def evaluated(world, pairs, metrics, **options):
    engine = zerotrain.build_engine(Given(**options), optimizer=torch.optim.SGD, world=world)
    rows = list(zip(*pairs, strict=True))
    return evaluate_all(
        engine=engine, world=world, dataset=rows, num_sequences=len(rows), micro_batch_size=3, metrics=metrics
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
def test_the_classes_are_where_the_sizes_say(world, dtype) -> None:
    images, words = classified((8, 5, 3, 4), 5, dtype), classified((8, 6), 6, dtype)
    assert evaluated(world, images, {"accuracy": Accuracy()})["val_accuracy"] == right_in(*images, dim=1)
    assert evaluated(world, words, {"accuracy": Accuracy()})["val_accuracy"] == right_in(*words, dim=1)
    last = images[0].movedim(1, -1), images[1]
    assert evaluated(world, last, {"accuracy": Accuracy()})["val_accuracy"] == right_in(*images, dim=1)
    jaccard = torchmetrics.JaccardIndex(
        "multiclass", num_classes=5, ignore_index=-100 if dtype != torch.uint8 else None
    )
    found = evaluated(world, images, {"jaccard": TorchMetric(jaccard)})
    jaccard.reset()
    jaccard.update(*images)
    assert found["val_jaccard"] == pytest.approx(float(jaccard.compute()))


def test_where_two_dimensions_may_have_the_classes_the_metric_says_which(world) -> None:
    outputs, labels = classified((8, 4, 4), 4)
    first, last = right_in(outputs, labels, dim=1), right_in(outputs, labels, dim=-1)
    assert first != last
    for class_dim, expected in ((1, first), (-1, last)):
        metrics = {"accuracy": Accuracy(class_dim=class_dim)}
        assert evaluated(world, (outputs, labels), metrics)["val_accuracy"] == expected
    with pytest.raises(
        CallbackError, match=r"callbacks\.accuracy: .*\(3, 4, 4\) may be in dimension 1 or in the last, by"
    ):
        evaluated(world, (outputs, labels), {"accuracy": Accuracy()})
    found = evaluated(world, (outputs, labels), {"accuracy": Accuracy()}, next_token_labels=True)
    assert found["val_accuracy"] == last
    with pytest.raises(ValueError, match=r"^class_dim: got 2; it must be 1, -1 or null$"):
        Accuracy(class_dim=2)


class Regression(torch.nn.Linear):
    """The target has a name of its own, or stands within another part."""

    def forward(self, features, target=None, *, with_outputs=False):
        inner = features if isinstance(features, dict) else {"x": features, "y": target}
        outputs = super().forward(inner["x"]).squeeze(-1)
        if inner.get("y") is None:
            return outputs
        loss = (outputs - inner["y"]).square().mean()
        return (loss, outputs.detach()) if with_outputs else loss


@pytest.mark.parametrize("target", ["target", "features.y"])
def test_a_metric_compares_with_the_part_that_it_names(make_trainer, tmp_path, target) -> None:
    generator = torch.Generator().manual_seed(0)
    features, y = torch.randn(12, 3, generator=generator), torch.randn(12, generator=generator)
    y[::4] = -100.0
    parts = zip(features, y, strict=True)
    rows = [{"features": x, "target": y} if target == "target" else {"features": {"x": x, "y": y}} for x, y in parts]
    model = Regression(3, 1)
    engine = zerotrain.build_engine(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0))
    metrics = {"mse": TorchMetric(torchmetrics.MeanSquaredError(), target=target, of=["validation", "training"])}
    data = type("Data", (), {"train": rows, "validation": rows})
    body = make_trainer(engine=engine, dataset=data, callbacks=metrics, max_steps=3, eval_batches=2, log_every=3).run()
    expected = (model(features) - y).square().mean().item()
    assert body["val_metrics"]["val_mse"] == pytest.approx(expected, rel=1e-5)
    assert body["final_val_loss"] == pytest.approx(expected, rel=1e-5)
    assert 3 in [line["step"] for line in lines_in(tmp_path, "train_mse")]
