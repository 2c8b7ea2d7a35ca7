"""Which parameters decay, and which of them Muon updates and which AdamW, in a world of one."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import assert_same

ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


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


def test_by_default_muon_gets_the_trained_matrices_of_the_blocks_that_are_no_embeddings():
    assert updated_whole() == ["blocks.0.linear.weight", "blocks.1.linear.weight"]


def test_patterns_name_other_matrices_and_never_vectors():
    found = updated_whole(matrices=["head.*", "blocks.0.*"])
    assert found == ["blocks.0.linear.weight", "blocks.0.table.weight", "head.weight"]


def test_both_learning_rates_are_scheduled_and_vectors_decay_unless_told_not_to():
    optimizer = muon(weight_decay=0.3, adamw_weight_decay=0.2)
    engine = zerotrain.build_engine(Net(), optimizer=optimizer, decay_all=False)
    shown = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in engine.param_groups}
    assert shown == {"matrices": (0.01, 0.2), "others": (0.01, 0.0), "whole matrices": (0.1, 0.3)}
    engine = zerotrain.build_engine(Net(), optimizer=optimizer)
    shown = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in engine.param_groups}
    assert shown == {"parameters": (0.01, 0.2), "whole parameters": (0.1, 0.3)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def one_step(engine: zerotrain.ZeroEngine) -> None:
    engine.backward(engine(torch.ones(5, 3)).square().mean())
    engine.step()


@pytest.mark.case(
    "optimizers",
    "with `decay_all=False`; the launcher's config",
    "matrices alone decay; the start of a run says so",
    under="`build_engine(optimizer=partial(AdamW, weight_decay=0.1))`",
)
@pytest.mark.parametrize("decay_all", [False, True])
def test_weight_decay_is_on_all_as_the_optimizer_has_it_or_on_matrices_alone(decay_all):
    plain = model()
    vectors = {"params": [each for each in plain.parameters() if each.ndim < 2]}
    if not decay_all:
        vectors["weight_decay"] = 0.0
    groups = [{"params": [each for each in plain.parameters() if each.ndim >= 2]}, vectors]
    optimizer = ADAMW(groups)
    plain(torch.ones(5, 3)).square().mean().backward()
    optimizer.step()
    engine = zerotrain.build_engine(model(), optimizer=ADAMW, decay_all=decay_all)
    one_step(engine)
    assert_same(engine.full_state_dict(), plain.state_dict())
