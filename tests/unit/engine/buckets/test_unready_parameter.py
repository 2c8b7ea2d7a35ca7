"""A parameter that is not ready is the same object of another class, until arithmetic meets it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from zerotrain.engine.buckets.unready_parameter import UnreadyParameter, unready_class


def unready(calls: list[str], parameter: nn.Parameter | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3)) if parameter is None else parameter

    def complete() -> None:
        calls.append("completed")
        parameter.__class__ = nn.Parameter

    parameter.__class__ = unready_class(complete)
    return parameter


def test_what_describes_a_parameter_can_be_read_and_hooked_and_switched_without_it() -> None:
    calls: list[str] = []
    parameter = unready(calls)
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.numel(), parameter.grad) == ((2, 3), torch.float32, 6, None)
    assert parameter.device == torch.device("cpu")
    assert parameter.requires_grad
    parameter.requires_grad_(False)
    parameter.requires_grad = True
    parameter.grad = None
    parameter.register_post_accumulate_grad_hook(lambda _: None).remove()
    assert {parameter: "found"}[parameter] == "found"
    assert calls == []


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "arithmetic": lambda p: p + 1,
    "a module's function": lambda p: functional.linear(torch.ones(1, 3), p),
    "nested arguments": lambda p: torch.cat([p, torch.zeros(2, 3)]),
    "named arguments": lambda p: torch.add(torch.zeros(2, 3), other=p),
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
def test_what_reads_values_completes_it_first_and_meets_a_plain_parameter(read: Callable[..., object]) -> None:
    calls: list[str] = []
    parameter = unready(calls)
    result = read(parameter)
    assert calls == ["completed"]
    assert type(parameter) is nn.Parameter
    assert not isinstance(result, UnreadyParameter)


def test_it_keeps_its_identity_attributes_hooks_and_places_in_lists() -> None:
    calls: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.is_special = True
    seen: list[str] = []
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    kept, module = [parameter], nn.ParameterList([parameter])
    unready(calls, parameter)
    assert kept[0] is module[0] is parameter
    assert parameter.is_special
    (kept[0] * 3).sum().backward()
    assert torch.equal(parameter.grad, torch.full((2,), 3.0))
    assert (calls, seen) == (["completed"], ["gradient"])


def test_the_values_of_functional_call_are_used_and_not_its_own() -> None:
    calls: list[str] = []
    layer = nn.Linear(3, 2, bias=False)
    unready(calls, layer.weight)
    got = torch.func.functional_call(layer, {"weight": torch.ones(2, 3)}, torch.ones(1, 3))
    assert torch.equal(got, torch.full((1, 2), 3.0))


def test_a_parameter_of_a_class_of_its_own_gets_that_back() -> None:
    class Scaled(nn.Parameter):
        pass

    parameter = Scaled(torch.ones(2))
    parameter.__class__ = unready_class(lambda: setattr(parameter, "__class__", Scaled))
    assert torch.equal(parameter * 2, torch.full((2,), 2.0))
    assert type(parameter) is Scaled


def test_what_cannot_be_completed_raises_where_it_is_read() -> None:
    def refuse() -> None:
        raise RuntimeError("sharded at rest")

    parameter = nn.Parameter(torch.ones(2))
    parameter.__class__ = unready_class(refuse)
    with pytest.raises(RuntimeError, match="sharded at rest"):
        parameter + 1
