"""What ranks compare of hyperparameters."""

import struct

import pytest
import torch

from zerotrain.engine.groups.hyperparameters import (
    Hyperparameters,
    mixed,
    restore_group,
    saved_group,
    shown_groups,
    told_values,
)


def test_values_are_told_alike_on_ranks_that_have_the_same() -> None:
    class Rule:
        pass

    def group() -> dict[str, object]:
        return {"lr": torch.tensor([0.5]), "betas": (0.9, torch.tensor(0.25)), "rule": Rule(), "fused": None, "k": 3}

    text, unread = told_values([group(), {"lr": 1e-3}])
    assert (text, unread) == told_values([group(), {"lr": 1e-3}])
    assert text == "[[0.5], [0.9, 0.25], 'Rule', None, 3, 0.001]"


def test_a_tensor_of_a_device_is_not_read() -> None:
    lr = torch.tensor(0.5, device="meta")  # which cannot be read
    text, unread = told_values([{"lr": lr, "betas": (lr, 0.5)}])
    assert "0.5" not in text.replace("0.5]", "")
    assert [each is lr for each in unread] == [True, True]
    assert mixed(unread).is_meta


def test_tensors_are_mixed_into_a_number_that_differs_where_they_do() -> None:
    next_fp32 = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", 0.1))[0] + 1))[0]
    rows = [[0.1, 0.2], [0.2, 0.1], [next_fp32, 0.2], [0.1, 0.0], [-0.1, 0.2]]
    numbers = [mixed([torch.tensor(value) for value in row]).item() for row in rows]
    assert len(set(numbers)) == len(rows)
    assert numbers[0] == mixed([torch.tensor([0.1, 0.2])]).item()
    assert all(number == int(number) and abs(number) < 2**47 for number in numbers)


def test_values_are_shown_by_name_and_group() -> None:
    groups = [{"name": "biases", "lr": torch.tensor(0.5)}, {"betas": (0.5, 0.9)}]
    assert shown_groups(groups) == {
        "name of group 'biases'": "biases",
        "lr of group 'biases'": "0.5",
        "betas of group 1": "[0.5, 0.9]",
    }


def test_the_first_rate_can_be_read_but_is_not_stored() -> None:
    group = Hyperparameters({"lr": 0.5})
    assert group["initial_lr"] == 0.5
    assert "initial_lr" not in group
    group["lr"] = 0.25
    assert group["initial_lr"] == 0.5
    group.setdefault("initial_lr", group["lr"])
    assert group["initial_lr"] == 0.25
    with pytest.raises(KeyError):
        group["momentum"]


def test_how_an_update_is_computed_is_this_machines_and_what_it_computes_is_the_files() -> None:
    how = {"foreach": None, "fused": False, "capturable": False, "differentiable": False}
    own = Hyperparameters({"lr": 0.5, "betas": (0.9, 0.99), "amsgrad": False} | how)
    others = dict.fromkeys(how, True)
    restore_group(own, saved_group({"lr": 0.25, "betas": (0.8, 0.9), "amsgrad": True} | others), 0.125)
    assert own == {"lr": 0.25, "betas": (0.8, 0.9), "amsgrad": True} | how
    assert own["initial_lr"] == 0.125
