"""What a build, and a change of what trains, refuse of settings, groups and optimizers: with what to do.

Models that are refused are in test_refused_models, optimizers that a probe finds out in groups/test_probe.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.groups.test_optimizers import ADAMW, Net, model, muon
from zerotrain.errors import ConfigError

pytestmark = [
    pytest.mark.case("parameters", "a complex parameter that is to train", "refused", of=("complex",)),
    pytest.mark.case(
        "optimizers",
        "`differentiable`; `capturable` on a CPU; a tensor as `lr` with `foreach`",
        "refused at the build",
        of=("capturable", "differentiable", "a tensor as rate with foreach"),
    ),
    pytest.mark.case(
        "offload: Activations off the device",
        "A model without units",
        "refused before ranks start",
        of=("activations without units",),
    ),
    pytest.mark.case(
        "optimizers",
        "that calls a closure (LBFGS, SAM)",
        under="an optimizer of your own, element by element",
        of=("all parameters at once",),
    ),
]


def build(groups: Any = None, plain: nn.Module | None = None, optimizer: Any = ADAMW, **more: Any) -> Any:
    return zerotrain.build_engine(plain or model(), optimizer=optimizer, param_groups=groups, **more)


def by(factory: Any, **how: Any) -> Callable[[], Any]:
    """A build with an optimizer of these arguments."""
    return lambda: build(optimizer=functools.partial(factory, **how))


def by_muon(plain: Callable[[], nn.Module] = Net, **how: Any) -> Callable[[], Any]:
    return lambda: build(plain=plain(), optimizer=muon(**how))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def partly_frozen() -> nn.Module:
    plain = model()
    plain[:2].requires_grad_(False)
    return plain


def with_complex() -> nn.Module:
    plain = model()
    plain.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return plain


def in_two_groups() -> Any:
    plain = model()
    return build([{"params": "0.*"}, {"params": [plain[0].weight]}, {"params": "*"}], plain)


NO_DICTS = "param_groups: a group is a {}; it takes a list of dicts"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # ---- groups
    "unassigned": (lambda: build([{"params": "0.*"}]), r"1.weight and 3 more are in no group.*\"params\": \[\"\*\"\]"),
    "no such name": (lambda: build([{"params": ["0.wight"]}]), "'0.wight' is no floating-point parameter of the model"),
    "another model's": (lambda: build([{"params": model()[0].weight}]), r"a tensor of shape \(4, 3\) is no"),
    "in two groups": (in_two_groups, r"0\.weight is in two groups"),
    "no params": (lambda: build([{"lr": 0.1}]), 'a group has no "params"'),
    "no names": (
        lambda: build([{"params": None}]),
        "param_groups: takes names, patterns .* and parameters, no NoneType",
    ),
    "parameters": (lambda: build(list(model().parameters())), NO_DICTS.format("Parameter")),
    "a number": (lambda: build(3), NO_DICTS.format("int")),
    "misspelt": (lambda: build([{"params": "*", "wieght_decay": 0}]), "AdamW has no wieght_decay; it has amsgrad"),
    "same name": (lambda: build([{"params": "0.*", "name": "a"}, {"params": "*", "name": "a"}]), "are called 'a'"),
    "a name of the engine's": (
        lambda: build([{"params": "*", "name": "whole model"}]),
        "a group is called 'whole model', a name of the engine's",
    ),
    "an option of neither": (
        lambda: build([{"params": "*", "momentums": 0.5}], blocks(), muon()),
        "AdamW and Muon has no momentums; it has adjust_lr_fn, amsgrad, betas",
    ),
    "a negative rate": (
        lambda: build([{"params": "*", "lr": -1.0}]),
        r"AdamW cannot have lr=-1.0: Invalid learning rate",
    ),
    "a text": (lambda: build([{"params": "*", "lr": "1e-3"}]), "lr='1e-3' is a text; AdamW takes a number"),
    # ---- what trains
    "freeze nothing": (lambda: build().freeze("3.*"), r"freeze: '3\.\*' is no floating-point parameter"),
    "freeze a list": (lambda: build().freeze(["0.*"]), "freeze: takes names, patterns .* and parameters, no list"),
    "freeze everything": (lambda: build().freeze("*"), "would leave no parameter that trains"),
    "late group of what trains": (
        lambda: build().add_param_group({"params": "0.*"}),
        "add_param_group: 0.weight and 1 more are in a group that trains; freeze it first",
    ),
    "unfreeze without a group": (
        lambda: build([{"params": "2.*"}], partly_frozen()).unfreeze("1.*"),
        "1.weight and 1 more are in no group; use engine.add_param_group",
    ),
    "complex": (lambda: build(plain=with_complex()), "phase is torch.complex64 and requires a gradient"),
    "nothing trains": (lambda: build(plain=model().requires_grad_(False)), "no trainable floating-point parameter"),
    # ---- optimizers
    "capturable": (
        by(torch.optim.AdamW, capturable=True),
        "=AdamW: its step fails on small tensors .*: If capturable=",
    ),
    "differentiable": (
        by(torch.optim.AdamW, differentiable=True),
        "optimizer=AdamW: differentiable=True asks for gradients through the update",
    ),
    "a tensor as rate with foreach": (
        by(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=True),
        "optimizer: lr as a Tensor is not supported for capturable=False",
    ),
    "a rate of None": (by(torch.optim.AdamW, lr=None), "optimizer: lr=None, .*float"),
    "no optimizer": (
        by(lambda groups: dict(enumerate(groups))),
        r"optimizer: makes a dict of its groups; it must make a torch\.optim",
    ),
    "all parameters at once": (
        by(lambda groups: torch.optim.LBFGS([groups[0]["params"][0]])),
        "optimizer=LBFGS: needs all parameters at once, which no rank has",
    ),
    "Muon alone": (
        by(torch.optim.Muon, lr=0.1),
        r"optimizer=Muon: updates only matrices, and 0.bias is none; use zerotrain",
    ),
    "a negative momentum": (by_muon(momentum=-1.0), r"optimizer: .*momentum.*-1"),
    "a pattern without matrices": (
        by_muon(matrices=["blocks.*", "nothing.*"]),
        r"matrices=\.\.\.\): no trainable two-dimensional .* 'nothing.\*'",
    ),
    "no blocks for Muon": (
        by_muon(lambda: nn.Linear(3, 3), matrices="auto"),
        r"matrices='auto'\): found no two-dimensional parameter in a repeated block",
    ),
    # ---- settings
    "stage": (lambda: build(zero=zerotrain.ZeroConfig(stage=5)), "zero.stage: got 5"),
    "precision": (lambda: build(precision="fp8"), r"precision\.name: got fp8; it must be fp32, bf16 or fp16"),
    "checkpoints without units": (
        lambda: build(plain=nn.Linear(4, 4), activation_checkpointing=True),
        r"Linear has no repeated blocks; name its units with zero\.units",
    ),
    "activations without units": (
        lambda: build(plain=nn.Linear(3, 3), offload=zerotrain.OffloadConfig(activations="cpu")),
        r"^offload\.activations=cpu: works unit by unit, and Linear has no repeated",
    ),
    "a disk without a folder": (
        lambda: build(offload=zerotrain.OffloadConfig(optimizer="disk")),
        r"offload\.path: got None; it must be a folder",
    ),
    "an update on the host that the device makes": (
        lambda: build(plain=Net(), optimizer=muon(), offload=zerotrain.OffloadConfig(optimizer="cpu", update="host")),
        r"offload\.update: got host; tensors .* it must be device",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_answered_with_what_to_do(mistake):
    call, answer = REFUSED[mistake]
    with pytest.raises(ConfigError, match=answer):
        call()
