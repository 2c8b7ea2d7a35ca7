"""What ranks compare of hyperparameters, and what users may make of them."""

import struct
from typing import Any

import numpy
import pytest
import torch

from tests.unit.engine.parts import alone, engine_on, train
from zerotrain.engine.groups.hyperparameters import Hyperparameters, mixed, restore_group, saved_group
from zerotrain.errors import EngineStateError


def test_tensors_are_mixed_into_a_number_that_differs_where_they_do():
    next_fp32 = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", 0.1))[0] + 1))[0]
    rows = [[0.1, 0.2], [0.2, 0.1], [next_fp32, 0.2], [0.1, 0.0], [-0.1, 0.2]]
    numbers = [mixed([torch.tensor(value) for value in row]).item() for row in rows]
    assert len(set(numbers)) == len(rows)
    assert numbers[0] == mixed([torch.tensor([0.1, 0.2])]).item()
    assert all(number == int(number) and abs(number) < 2**47 for number in numbers)


def test_how_an_update_is_computed_is_this_machines_and_what_it_computes_is_the_files():
    how = {"foreach": None, "fused": False, "capturable": False, "differentiable": False}
    own = Hyperparameters({"lr": 0.5, "betas": (0.9, 0.99), "amsgrad": False} | how)
    others = dict.fromkeys(how, True)
    restore_group(own, saved_group({"lr": 0.25, "betas": (0.8, 0.9), "amsgrad": True} | others), 0.125)
    assert own == {"lr": 0.25, "betas": (0.8, 0.9), "amsgrad": True} | how
    assert own["initial_lr"] == 0.125


# ---- what a user may make of engine.param_groups


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda groups: groups[0].update(lr="1e-3"), "lr of group 'first' was set to '1e-3'; it must be a number"),
        (lambda groups: groups[0].update(lr=None), "lr of group 'first' was set to None; it must be a number"),
        (lambda groups: groups[1].pop("momentum"), "momentum of group 'second' was removed; set it to a value instead"),
        (lambda groups: groups[0].pop("name"), "name of group 'first' was removed"),
        (lambda groups: groups[0].update(name="other"), "name of group 'first' was changed to 'other'; keep the name"),
        (lambda groups: groups.pop(), "the engine has 2 groups, and some were added, removed, moved or "),
        (lambda groups: groups.__setitem__(1, groups[0]), "some were added, removed, moved or replaced by hand"),
        (lambda groups: groups.append({"lr": 0.1}), "call engine.add_param_group for another"),
        (lambda groups: groups.__setitem__(0, dict(groups[0])), "replaced by hand; change the values in a group"),
    ],
)
def test_a_group_that_no_update_can_take_is_refused_with_what_to_do_and_nothing_has_changed(change, answer, tmp_path):
    engine = engine_on(
        alone(),
        optimizer=sgd,
        param_groups=[{"params": "*.bias", "name": "first"}, {"params": "*", "name": "second", "momentum": 0.9}],
    )
    train(engine, 0)
    kept, before = [*engine.param_groups], [{**group} for group in engine.param_groups]
    weights = engine.weights_sha256()
    change(engine.param_groups)
    for call in (lambda: train(engine, 1), lambda: engine.save(tmp_path / "save"), lambda: engine.set_stage(3)):
        with pytest.raises(EngineStateError, match=f"engine.param_groups: .*{answer}"):
            call()
        engine.zero_grad()
    assert engine.weights_sha256() == weights
    assert not (tmp_path / "save").exists()
    engine.param_groups[:] = kept
    for group, values in zip(engine.param_groups, before, strict=True):
        group.update(values)
    train(engine, 1)
    assert engine.weights_sha256() != weights


@pytest.mark.parametrize("value", [numpy.float32(0.01), torch.tensor(0.01), 1])
def test_a_rate_may_be_any_number(value):
    engine = engine_on(alone(), optimizer=sgd)
    engine.param_groups[0]["lr"] = value
    train(engine, 0)
