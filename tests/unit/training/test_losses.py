"""A loss of the config beside a model that returns outputs, and what is refused before any rank starts."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zerotrain.models
from tests.unit.configs import ADAMW, CONSTANT, GPT
from tests.unit.training import losses
from zerotrain.config import checks
from zerotrain.config.schema import Config, PlanConfig, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight, loss_trial
from zerotrain.run.factory import add_config_loss, build
from zerotrain.training.losses import CrossEntropy, add_loss

HERE, SELF = losses.__name__, "tests.unit.training.test_losses"
CROSS = {"_target_": "zerotrain.training.losses.CrossEntropy"}
DATA = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 2, "vocab_size": 2, "num_sequences": 2}
ACCURACY_OF_Y = {"a": {"_target_": "zerotrain.training.Accuracy", "target": "y"}}
ACCURACY = {"accuracy": {"_target_": "zerotrain.training.Accuracy"}}


class Named:
    """Rows by name, whose target lies within another part."""

    def __init__(self) -> None:
        rows = [losses.classes(row) for row in range(8)]
        self.train = self.validation = [
            {"features": features, "answers": {"y": label, "text": label}} for features, label in rows
        ]


class OfAnotherType:
    """Rows by name, a part of which has the type that numpy gives."""

    def __init__(self, part: str) -> None:
        rows = [dict(zip(("features", "labels"), losses.classes(row), strict=True)) for row in range(8)]
        self.train = self.validation = [row | {part: row[part].double()} for row in rows]


class Column(losses.Outputs):
    """Outputs of shape (B, 1)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features)[:, :1]


class Learnt(torch.nn.Linear):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def none(outputs: torch.Tensor, batch: Any) -> None:
    """Forgets to return."""


def each_row(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.square().mean(dim=1)


def other_key(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["label"])


def config_of(kind: str = "classes", model: str = "Outputs", loss: Any = CROSS, **groups: Any) -> Config:
    data = {"_target_": f"{HERE}.Rows", "kind": kind} if kind in losses.CONFIGURED else {"_target_": f"{SELF}.Named"}
    home = HERE if hasattr(losses, model) else SELF
    train = TrainConfig(max_steps=2, micro_batch_size=2)
    groups = {"data": data, "optimizer": ADAMW, "scheduler": CONSTANT, "train": train} | groups
    return Config(model={"_target_": f"{home}.{model}"}, loss=loss, **groups)


def refusal(config: Config) -> str:
    if problems := list(checks.class_problems(config)):
        return "\n".join(problems)
    with pytest.raises(ConfigError) as refused:
        preflight.check(config)
    return "\n".join(refused.value.problems)


HAS = "has features, answers.y, answers.text"
REFUSED = {
    "no target": (
        {"kind": "named"},
        f"loss.target: CrossEntropy compares outputs with labels, and a batch of data.train {HAS}; give ",
    ),
    "another target": (
        {"kind": "named", "loss": CROSS | {"target": "answers.z"}},
        "loss.target: CrossEntropy compares outputs with answers.z, and ",
    ),
    "a target the model needs": (
        {"kind": "named", "loss": CROSS | {"target": "features"}},
        f"loss: a batch of data.train {HAS}, and Outputs.forward: missing a ",
    ),
    "a key that is not there": (
        {"kind": "named", "loss": {"_target_": f"{SELF}.other_key"}},
        "loss: other_key: KeyError: 'label'",
    ),
    "a metric's target": (
        {"kind": "named", "loss": CROSS | {"target": "answers.y"}, "callbacks": ACCURACY_OF_Y},
        f"callbacks.a: compares outputs with y, and a batch of data.validation {HAS}; give ",
    ),
    "no loss": ({"loss": DATA}, "loss._target_: got zerotrain.data.SyntheticTokens, whose objects cannot be called; "),
    "a text": (
        {"loss": {"_target_": f"{SELF}.HERE"}},
        f"loss._target_: got {SELF}.HERE, a str; it must be a class or function",
    ),
    "nowhere": ({"loss": {"_target_": f"{SELF}.nowhere"}}, f"loss._target_: got {SELF}.nowhere; {SELF} has no nowhere"),
    "a wrong name": (
        {"loss": CROSS | {"wieght": [1.0]}},
        f"loss.wieght: {CROSS['_target_']} takes no such argument; did you mean weight?",
    ),
    "a wrong kind": (
        {"loss": CROSS | {"weight": "heavy"}},
        f"loss.weight: got heavy; {CROSS['_target_']} takes a list",
    ),
    "two weights of seven": (
        {"loss": CROSS | {"weight": [1.0, 2.0]}},
        "loss: CrossEntropy: loss.weight has 2 numbers for outputs of shape (2, 7); give one for each class",
    ),
    "not reduced": (
        {"loss": CROSS | {"reduction": "none"}},
        "loss: CrossEntropy returns a Tensor of shape (2,) for a batch; it must return one ",
    ),
    "no return": (
        {"loss": {"_target_": f"{SELF}.none"}},
        "loss: none returns a NoneType for a batch; it must return one number",
    ),
    "a function of each row": (
        {"loss": {"_target_": f"{SELF}.each_row"}},
        "loss: each_row returns a Tensor of shape (2,) for a ",
    ),
    "parameters": (
        {"loss": {"_target_": f"{SELF}.Learnt"}},
        "loss: Learnt has parameters, which nothing would train; make it a part of the model",
    ),
    "three arguments": (
        {"loss": {"_target_": "torch.nn.TripletMarginLoss"}},
        "loss: TripletMarginLoss takes more than outputs and a target; give a function of your ",
    ),
    "features in double precision": (
        {"data": {"_target_": f"{SELF}.OfAnotherType", "part": "features"}},
        "data.train[0]: part features is float64, and Outputs computes in float32; make it float32 in the dataset, "
        "such as by .float()",
    ),
    "classes in double precision": (
        {"data": {"_target_": f"{SELF}.OfAnotherType", "part": "labels"}},
        "loss: CrossEntropy: its target is float64; give numbers of classes as integers, such as by .long()",
    ),
    "two shapes": (
        {"model": "Column", "loss": {"_target_": "torch.nn.MSELoss"}},
        "loss: MSELoss: it compares outputs of shape (2, 1) with a target of shape (2,); both must have one "
        "shape; loss=cross_entropy takes numbers of classes",
    ),
    "none": (
        {"loss": {}},
        "data.train[0] gives 2 parts without names, but Outputs.forward takes (features): too many positional "
        "arguments; a model that returns outputs needs a loss beside it, such as loss=cross_entropy",
    ),
    "a name where there are none": (
        {"loss": CROSS | {"target": "y"}},
        "loss.target: CrossEntropy compares outputs with y, and a batch of data.train has 2 parts",
    ),
    "no sum": (
        {"train": TrainConfig(max_steps=2, micro_batch_size=2, loss_over="sum")},
        "train.loss_over: got sum; of ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.case(
    "losses",
    "A loss by config that has not what it compares, cannot be called, has parameters, or gives no number",
    "refused before any rank starts, in one line",
)
def test_a_loss_that_cannot_be_trained_is_refused_in_one_line(name):
    settings, line = REFUSED[name]
    refused = refusal(config_of(**settings))
    assert refused.startswith(line)
    assert "\n" not in refused


@pytest.mark.parametrize("name", ["two weights of seven", "two shapes", "not reduced", "a function of each row"])
def test_a_plan_refuses_a_loss_as_a_run_does(name):
    config = config_of(**REFUSED[name][0], plan=PlanConfig(only=True))
    assert refusal(config).startswith(REFUSED[name][1])


def test_a_loss_is_tried_on_shapes_alone_where_the_model_is_large(monkeypatch):
    monkeypatch.setattr(loss_trial, "MOST_NUMEL", 10)
    assert refusal(config_of(loss=CROSS | {"reduction": "none"})).startswith("loss: CrossEntropy returns a Tensor of ")
    preflight.check(config_of())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "named", "loss": CROSS | {"target": "answers.y"}, "callbacks": ACCURACY},
        {"kind": "squares", "loss": {"_target_": "torch.nn.SmoothL1Loss"}},
        {"kind": "a sum of torch", "loss": {"_target_": "torch.nn.MSELoss", "reduction": "sum"}},
        {"kind": "a function", "model": "Logits", "loss": {"_target_": f"{HERE}.per_row"},
         "train": TrainConfig(max_steps=2, micro_batch_size=2, loss_over="rows")},
        {"kind": "a function's count", "loss": {"_target_": f"{HERE}.Sampled"}},
        {"kind": "classes", "model": "Drawing", "loss": {}, "data": {"_target_": f"{HERE}.Rows", "kind": "labels"}},
    ],
    ids=str,
)  # fmt: skip
def test_honest_losses_are_not_refused(settings):
    preflight.check(config_of(**settings))


def test_a_model_with_a_loss_keeps_its_names_its_class_and_its_outputs():
    model = losses.CONFIGURED["weights of classes"].made()
    plain = losses.CONFIGURED["weights of classes"].model()
    assert isinstance(model, losses.Logits)
    assert type(model).__name__ == "Logits"
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids, labels = losses.CONFIGURED["weights of classes"].batch()
    loss, outputs = copy.deepcopy(model)(ids, labels, with_outputs=True)
    assert torch.equal(outputs, model(ids))
    assert torch.equal(loss, model(ids, labels))
    assert not outputs.requires_grad
    assert loss.requires_grad
    assert model.loss_count(ids, labels) == pytest.approx(torch.tensor(losses.CLASS_WEIGHTS)[labels[labels != 0]].sum())


def test_a_language_model_of_ours_has_its_own_loss_with_the_cross_entropy_of_a_config():
    torch.manual_seed(0)
    model = zerotrain.models.GPT(**{key: value for key, value in GPT.items() if key != "_target_"})
    ids, labels = torch.randint(256, (2, 3, 16)).unbind()
    labels[0, 3:] = -100
    own = model(ids, labels)
    add_loss(model, CrossEntropy(), None)
    torch.testing.assert_close(model(ids, labels), own)
    assert model.loss_count(ids, labels) == 3 + 2 * 16
    assert model(ids).shape == (3, 16, 256)


def test_a_loss_of_16_bit_outputs_is_computed_in_32():
    model = losses.CONFIGURED["classes"].made()
    features, labels = losses.CONFIGURED["classes"].batch()
    outputs = model.bfloat16()(features.bfloat16())
    loss = model(features.bfloat16(), labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(outputs.float(), labels.long()))


def test_a_config_without_a_loss_leaves_the_model_as_it_is():
    config = config_of(loss={})
    model = build("model", config.target("model"))
    add_config_loss(config, model)
    assert type(model) is losses.Outputs
