"""Groups of one's own, what is refused of them, and changes of what trains, in a world of one."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.errors import ConfigError, EngineStateError

pytestmark = [
    pytest.mark.case("parameters", "a complex parameter that is to train", "refused", of=("complex",)),
]


MUON = zerotrain.MuonWithAdamW(lr=0.1, adamw_lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def build(groups: Any = None, plain: nn.Module | None = None, optimizer: Any = ADAMW) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(plain or model(), optimizer=optimizer, param_groups=groups)


def one_step(engine: zerotrain.ZeroEngine) -> None:
    engine.backward(engine(torch.ones(5, 3)).square().mean())
    engine.step()


def test_a_group_shows_what_it_sets_and_takes_the_rest_from_the_optimizer() -> None:
    engine = build([{"params": "*.bias", "lr": 0.5, "name": "biases"}, {"params": ["*"]}])
    biases, rest = engine.param_groups
    assert (biases["name"], biases["lr"], biases["initial_lr"], biases["weight_decay"]) == ("biases", 0.5, 0.5, 0.5)
    assert (rest["name"], rest["lr"], rest["initial_lr"]) == ("group 1", 0.1, 0.1)
    assert "params" not in biases


def test_parameters_may_be_named_by_themselves_and_the_first_group_that_names_one_has_it() -> None:
    plain = model()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    engine = build([{"params": [plain[0].weight], "lr": 0.0}, {"params": ["*"]}], plain)
    one_step(engine)
    moved = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"0.weight"}


def test_an_empty_group_is_kept_with_a_warning_and_may_be_filled_later() -> None:
    with pytest.warns(UserWarning, match="group 'group 0' holds no parameter"):
        engine = build([{"params": []}, {"params": "*"}])
    assert len(engine.param_groups) == 2
    one_step(engine)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unassigned": (lambda: build([{"params": "0.*"}]), r"1.weight and 3 more are in no group.*\"params\": \[\"\*\"\]"),
    "no such name": (lambda: build([{"params": ["0.wight"]}]), "'0.wight' is no floating-point parameter of the model"),
    "another model's": (lambda: build([{"params": model()[0].weight}]), r"a tensor of shape \(4, 3\) is no"),
    "no params": (lambda: build([{"lr": 0.1}]), 'a group has no "params"'),
    "misspelt": (
        lambda: build([{"params": "*", "wieght_decay": 0}]),
        "AdamW has no wieght_decay; it has amsgrad",
    ),
    "same name": (lambda: build([{"params": "0.*", "name": "a"}, {"params": "*", "name": "a"}]), "are called 'a'"),
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
    "a group of a name of the engine's": (
        lambda: build([{"params": "*", "name": "whole model"}]),
        "a group is called 'whole model', a name of the engine's",
    ),
    "an option of neither": (
        lambda: build([{"params": "*", "momentums": 0.5}], like_blocks(), MUON),
        "AdamW and Muon has no momentums; it has adjust_lr_fn, amsgrad, betas",
    ),
    "a negative rate": (
        lambda: build([{"params": "*", "lr": -1.0}]),
        r"AdamW cannot have lr=-1.0: Invalid learning rate",
    ),
    "a text": (lambda: build([{"params": "*", "lr": "1e-3"}]), "lr='1e-3' is a text; AdamW takes a number"),
    "complex": (lambda: build(plain=with_complex()), "phase is torch.complex64 and requires a gradient"),
}


def like_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def partly_frozen() -> nn.Module:
    plain = model()
    plain[:2].requires_grad_(False)
    return plain


def with_complex() -> nn.Module:
    plain = model()
    plain.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return plain


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_answered_with_what_to_do(mistake: str) -> None:
    make, answer = REFUSED[mistake]
    with pytest.raises(ConfigError, match=answer):
        make()


def test_a_parameter_named_by_itself_in_two_groups_is_refused() -> None:
    plain = model()
    with pytest.raises(ConfigError, match=r"0\.weight is in two groups"):
        build([{"params": "0.*"}, {"params": [plain[0].weight]}, {"params": "*"}], plain)


def test_a_refused_change_leaves_the_engine_as_it_was() -> None:
    engine = build([{"params": "2.*"}], partly_frozen())
    with pytest.raises(ConfigError):
        engine.add_param_group({"params": "1.*", "momentum": 0.9})
    one_step(engine)
    before = engine.full_state_dict()
    engine.add_param_group({"params": engine.module[1].parameters(), "lr": 0.01})
    one_step(engine)
    assert [group["lr"] for group in engine.param_groups] == [0.1, 0.01]
    moved = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.case("parameters", "a change between a backward and its step, or a forward and its backward", "refused")
def test_what_trains_cannot_change_while_a_gradient_waits() -> None:
    engine = build()
    engine.backward(engine(torch.ones(5, 3)).square().mean())
    with pytest.raises(EngineStateError, match=r"call engine\.step\(\) first"):
        engine.freeze("0.*")
    engine.step()
    engine.freeze("0.*")


def test_the_backward_of_a_forward_from_before_a_change_is_refused() -> None:
    engine = build(plain=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    loss = engine(torch.ones(5, 3)).square().mean()
    engine.freeze("0.weight")
    with pytest.raises(EngineStateError, match=r"computed before .* a change of what trains"):
        engine.backward(loss)


def test_a_change_frees_the_buckets_it_replaces_at_once() -> None:
    engine = build()
    one_step(engine)
    old = [weakref.ref(bucket.update.master_weight) for bucket in engine.schedule.buckets]
    gc.disable()  # what only the garbage collector frees is held for minutes
    try:
        engine.freeze("0.*")
        assert [each() for each in old] == [None] * len(old)
    finally:
        gc.enable()


class StateFromTheStart(torch.optim.Optimizer):
    """Makes its state with the group, as Adagrad does on torch 2.11, and needs it there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.full_like(weight, 0.1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] -- torch's own takes a closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    total = self.state[weight]["sum"].addcmul_(weight.grad, weight.grad)
                    weight.addcdiv_(weight.grad, total.sqrt(), value=-0.1)


OPTIMIZERS = {
    "AdamW with amsgrad": functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "one that makes its state with the group": StateFromTheStart,
}


@pytest.mark.case(
    "parameters",
    "any of torch's element-wise optimizers over such changes",
    "parameters that go on training keep their state",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_goes_on_training_keeps_its_state_and_what_is_unfrozen_starts_anew(name: str) -> None:
    optimizer, plain = OPTIMIZERS[name], model()
    engine = build([{"params": "*"}], model(), optimizer)
    reference = optimizer([{"params": list(plain.parameters())}])
    for step in range(6):
        if step == 2:
            engine.freeze("0.*")
            plain[0].requires_grad_(False)
        if step == 4:
            engine.unfreeze("0.weight")
            plain[0].weight.requires_grad_(True)
            reference.state.pop(plain[0].weight)
            if anew := optimizer([plain[0].weight]).state:  # of one that makes it with the group
                reference.state[plain[0].weight] = anew[plain[0].weight]
        one_step(engine)
        reference.zero_grad()
        plain(torch.ones(5, 3)).square().mean().backward()
        reference.step()
    for key, value in engine.full_state_dict().items():
        assert torch.equal(value, plain.state_dict()[key]), key


class RowsLater(torch.optim.SGD):
    """Keeps, later than it is probed, a tensor that is neither of the weight's shape nor a single number."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > 12:
                state["rows"] = torch.zeros(3)


def test_a_change_is_refused_with_state_that_cannot_be_cut() -> None:
    engine = build(optimizer=functools.partial(RowsLater, lr=0.1))
    for _ in range(13):
        one_step(engine)
    with pytest.raises(EngineStateError, match=r"keeps 'rows' of shape \(3,\)"):
        engine.freeze("0.*")
    one_step(engine)
