"""Which parameters Muon updates and which AdamW, in a world of one."""

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"table": nn.Embedding(3, 4), "linear": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
            for _ in range(2)
        )
        self.head = nn.Linear(4, 9)
        for block in self.blocks:
            block["frozen"].requires_grad_(False)


def muon(**settings: Any) -> zerotrain.MuonWithAdamW:
    return zerotrain.MuonWithAdamW(lr=0.1, adamw_lr=0.01, **settings)


def updated_whole(**settings: Any) -> list[str]:
    engine = zerotrain.build_engine(Net(), optimizer=muon(**settings))
    return sorted(
        managed.names[0]
        for bucket in engine.schedule.trained
        for managed in bucket.spec.parameters
        if managed.is_updated_whole
    )


def test_by_default_muon_gets_the_trained_matrices_of_the_blocks_that_are_no_embeddings() -> None:
    assert updated_whole() == ["blocks.0.linear.weight", "blocks.1.linear.weight"]


def test_patterns_name_other_matrices_and_never_vectors() -> None:
    assert updated_whole(matrices=["head.*", "blocks.0.*"]) == [
        "blocks.0.linear.weight",
        "blocks.0.table.weight",
        "head.weight",
    ]


@pytest.mark.parametrize(
    ("model", "matrices", "problem"),
    [
        (Net(), ["blocks.*", "nothing.*"], r"matrices=\.\.\.\): no trainable two-dimensional .* 'nothing.\*'"),
        (Net(), ["head.bias"], r"matrices=\.\.\.\): no trainable two-dimensional parameter matches 'head.bias'"),
        (nn.Linear(3, 3), "auto", r"matrices='auto'\): found no two-dimensional parameter in a repeated block"),
    ],
)
def test_matrices_that_are_not_there_are_refused(model: nn.Module, matrices: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        zerotrain.build_engine(model, optimizer=muon(matrices=matrices))


def test_what_torch_refuses_is_a_config_problem() -> None:
    with pytest.raises(ConfigError, match=r"optimizer: .*momentum.*-1"):
        zerotrain.build_engine(Net(), optimizer=muon(momentum=-1.0))


def test_both_learning_rates_are_scheduled_and_vectors_decay_unless_told_not_to() -> None:
    optimizer = muon(weight_decay=0.3, adamw_weight_decay=0.2)
    engine = zerotrain.build_engine(Net(), optimizer=optimizer, decay_all=False)
    shown = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in engine.param_groups}
    assert shown == {"matrices": (0.01, 0.2), "others": (0.01, 0.0), "whole matrices": (0.1, 0.3)}
    engine = zerotrain.build_engine(Net(), optimizer=optimizer)
    shown = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in engine.param_groups}
    assert shown == {"parameters": (0.01, 0.2), "whole parameters": (0.1, 0.3)}
