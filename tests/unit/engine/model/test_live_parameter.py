"""A parameter that is not ready is the same object of another class, until arithmetic meets it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerotrain
from tests.unit.engine.parts import alone, engine_on
from zerotrain.engine.model.live_parameter import LiveParameter, UnreadyParameter
from zerotrain.errors import EngineStateError


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = Scaled(torch.ones(3))
    return model


def build(stage: int) -> tuple[zerotrain.ZeroEngine, Any]:
    engine = engine_on(alone(), two_layers, zero={"stage": stage})
    return engine, engine.module[1].weight


def test_what_describes_a_parameter_can_be_read_and_hooked_and_switched_without_it():
    _, parameter = build(3)
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.numel(), parameter.grad) == ((3, 3), torch.float32, 9, None)
    assert parameter.device == torch.device("cpu")
    assert parameter.requires_grad
    parameter.requires_grad_(False)
    parameter.requires_grad = True
    parameter.grad = None
    parameter.register_post_accumulate_grad_hook(lambda _: None).remove()
    assert {parameter: "found"}[parameter] == "found"
    assert type(parameter) is UnreadyParameter


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "arithmetic": lambda p: p + 1,
    "a module's function": lambda p: functional.linear(torch.ones(1, 3), p),
    "nested arguments": lambda p: torch.cat([p, torch.zeros(3, 3)]),
    "named arguments": lambda p: torch.add(torch.zeros(3, 3), other=p),
    "a method": lambda p: p.norm(),
    "its data": lambda p: p.data,
    "in place": lambda p: p.detach().zero_(),
    "a value": lambda p: p.tolist(),
    "its memory": lambda p: p.data_ptr(),
    "an index": lambda p: p[0],
    "a copy": copy.deepcopy,
    "printing": repr,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_values_is_refused_between_calls_and_gathers_them_first_in_a_forward(read):
    engine, parameter = build(3)
    with pytest.raises(EngineStateError, match="between engine calls"):
        read(parameter)
    with torch.no_grad(), engine.forward_scope():
        assert type(parameter) is UnreadyParameter
        result = read(parameter)
        assert type(parameter) is LiveParameter
        assert not isinstance(result, LiveParameter)


def test_a_parameter_of_a_class_of_its_own_gets_that_back():
    engine, _ = build(3)
    parameter = engine.module[1].bias
    with torch.no_grad(), engine.forward_scope():
        assert torch.equal(parameter * 2, torch.full((3,), 2.0))
        assert isinstance(parameter, Scaled)
        assert "Live" not in repr(parameter)
        assert type(copy.deepcopy(parameter)) is Scaled


def test_data_that_is_set_is_copied_and_data_of_another_kind_is_refused():
    _, parameter = build(2)
    memory = parameter.data_ptr()
    parameter.data = torch.ones(3, 3)
    parameter.data.mul_(2)
    assert parameter.data_ptr() == memory
    assert parameter.tolist() == [[2.0] * 3] * 3
    for other in (torch.ones(3, 3).double(), torch.ones(3, 2), torch.ones(3, 3, device="meta")):
        with pytest.raises(
            EngineStateError, match=r"1.weight lies in memory of the engine, as torch.float32, \(3, 3\)"
        ):
            parameter.data = other
    parameter.data = parameter.data  # as `model.to(device)` does


def test_a_gradient_that_is_set_by_hand_is_refused():
    _, parameter = build(2)
    with pytest.raises(EngineStateError, match=r"the gradient of 1.weight was set by hand"):
        parameter.grad = torch.ones(3, 3)
