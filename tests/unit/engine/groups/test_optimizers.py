"""Parameter groups and refusals of the sharded optimizer, in a world of one."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.errors import ConfigError

# Which parameters Muon updates and which AdamW, in a world of one.


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


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def one_step(engine: zerotrain.ZeroEngine) -> dict[str, torch.Tensor]:
    engine.backward(engine(torch.ones(5, 3)).square().mean())
    engine.step()
    return engine.full_state_dict()


def plain_step(groups: list[dict], optimizer: functools.partial, plain: nn.Module) -> dict[str, torch.Tensor]:
    steps = optimizer(groups)
    plain(torch.ones(5, 3)).square().mean().backward()
    steps.step()
    return plain.state_dict()


@pytest.mark.case(
    "optimizers",
    "with `decay_all=False`; the launcher's config",
    "matrices alone decay; the start of a run says so",
    under="`build_engine(optimizer=partial(AdamW, weight_decay=0.1))`",
)
@pytest.mark.parametrize("decay_all", [False, True])
def test_weight_decay_is_on_all_as_the_optimizer_has_it_or_on_matrices_alone(decay_all: bool) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    plain = model()
    vectors = {"params": [each for each in plain.parameters() if each.ndim < 2]}
    if not decay_all:
        vectors["weight_decay"] = 0.0
    groups = [{"params": [each for each in plain.parameters() if each.ndim >= 2]}, vectors]
    expected = plain_step(groups, optimizer, plain)
    got = one_step(zerotrain.build_engine(model(), optimizer=optimizer, decay_all=decay_all))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.Adagrad, lr=0.1),
        functools.partial(torch.optim.RMSprop, lr=0.1, centered=True),
        functools.partial(torch.optim.Rprop, lr=0.1),
        functools.partial(torch.optim.NAdam, lr=0.1),
    ],
    ids=lambda each: each.func.__name__,
)
def test_any_element_wise_optimizer_of_torch_updates_as_by_itself(optimizer: functools.partial) -> None:
    plain = model()
    expected = plain_step([{"params": list(plain.parameters())}], optimizer, plain)
    got = one_step(zerotrain.build_engine(model(), optimizer=optimizer))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


class OfWholeTensors(torch.optim.SGD):
    whole_tensor = True


def test_an_optimizer_that_is_declared_to_update_whole_tensors_has_groups_of_such() -> None:
    engine = zerotrain.build_engine(model(), optimizer=functools.partial(OfWholeTensors, lr=0.1))
    assert [group["name"] for group in engine.param_groups] == ["whole parameters"]
    expected = one_step(zerotrain.build_engine(model(), optimizer=functools.partial(torch.optim.SGD, lr=0.1)))
    assert all(torch.equal(value, expected[name]) for name, value in one_step(engine).items())


@pytest.mark.case(
    "optimizers", "that calls a closure (LBFGS, SAM)", under="an optimizer of your own, element by element"
)
def test_an_optimizer_that_needs_more_than_whole_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer=LBFGS: needs all parameters at once, which no rank has"):
        zerotrain.build_engine(model(), optimizer=lambda groups: torch.optim.LBFGS([groups[0]["params"][0]]))


def test_muon_alone_is_answered_with_what_takes_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"optimizer=Muon: updates only matrices, and 0.bias is none; use zerotrain"):
        zerotrain.build_engine(model(), optimizer=functools.partial(torch.optim.Muon, lr=0.1))


def test_a_learning_rate_set_on_the_groups_reaches_every_bucket() -> None:
    engine = zerotrain.build_engine(
        model(), optimizer=functools.partial(torch.optim.SGD, lr=0.1), zero=zerotrain.ZeroConfig(bucket_mb=1e-5)
    )
    assert len(engine.schedule.buckets) > 2
    assert {group["initial_lr"] for group in engine.param_groups} == {0.1}
    before = engine.weights_sha256()
    for group in engine.param_groups:
        group["lr"] = 0.0
    one_step(engine)
    assert engine.weights_sha256() == before


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable floating-point parameter"):
        zerotrain.build_engine(model().requires_grad_(False), optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("zero", "problem"),
    [
        (zerotrain.ZeroConfig(stage=5), "zero.stage: got 5"),
        (zerotrain.ZeroConfig(bucket_mb=0), "zero.bucket_mb: got 0"),
        (zerotrain.ZeroConfig(reduction="ring"), "zero.reduction: got ring"),
    ],
)
def test_a_setting_out_of_range_is_refused_in_python_as_on_the_command_line(
    zero: zerotrain.ZeroConfig, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        zerotrain.build_engine(model(), optimizer=torch.optim.SGD, zero=zero)


def test_what_makes_no_optimizer_is_refused_with_what_it_makes() -> None:
    with pytest.raises(
        zerotrain.ConfigError, match=r"optimizer: makes a dict of its groups; it must make a torch\.optim"
    ):
        zerotrain.build_engine(model(), optimizer=lambda groups: dict(enumerate(groups)))


@pytest.mark.parametrize("lr", [None, "fast"])
def test_arguments_that_an_optimizer_cannot_be_made_with_are_in_the_refusal(lr: object) -> None:
    with pytest.raises(ConfigError, match=f"optimizer: lr={lr!r}, .*float"):
        zerotrain.build_engine(model(), optimizer=functools.partial(torch.optim.AdamW, lr=lr))
