"""A parameter that is not ready is the same object of another class, until arithmetic meets it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from zerotrain.engine.model.live_parameter import LiveParameter, UnreadyParameter, live_class, settle
from zerotrain.errors import EngineStateError


class Bucket:
    """The home of one parameter, which notes what it is asked for."""

    gradient_is_here = False

    def __init__(self, parameter: nn.Parameter, calls: list[str]) -> None:
        self.parameter, self.calls = parameter, calls
        self.live_class = live_class(type(parameter))
        settle([parameter], self)
        KEPT.append(self)

    def complete(self) -> None:
        self.calls.append("completed")
        self.parameter.__class__ = self.live_class

    def data_was_read(self) -> None:
        self.calls.append("data")

    def holds_gradient(self) -> bool:
        return self.gradient_is_here

    def name_of(self, parameter: nn.Parameter) -> str:
        return "first.weight"


KEPT: list[Bucket] = []
"""A parameter does not keep its bucket."""


def unready(calls: list[str], parameter: nn.Parameter | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3)) if parameter is None else parameter
    Bucket(parameter, calls)
    parameter.__class__ = UnreadyParameter
    return parameter


def live(calls: list[str]) -> tuple[nn.Parameter, Bucket]:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    bucket = Bucket(parameter, calls)
    parameter.__class__ = bucket.live_class
    return parameter, bucket


def test_what_describes_a_parameter_can_be_read_and_hooked_and_switched_without_it():
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
def test_what_reads_values_completes_it_first_and_meets_a_live_parameter(read):
    calls: list[str] = []
    parameter = unready(calls)
    result = read(parameter)
    assert calls[0] == "completed"
    assert calls.count("completed") == 1
    assert type(parameter) is LiveParameter
    assert not isinstance(result, LiveParameter)


def test_a_parameter_of_a_class_of_its_own_gets_that_back():
    class Scaled(nn.Parameter):
        pass

    calls: list[str] = []
    parameter = unready(calls, Scaled(torch.ones(2)))
    assert torch.equal(parameter * 2, torch.full((2,), 2.0))
    assert isinstance(parameter, Scaled)
    assert "Live" not in repr(parameter)
    assert type(copy.deepcopy(parameter)) is Scaled


def test_data_that_is_set_is_copied_and_data_of_another_kind_is_refused():
    calls: list[str] = []
    parameter, _ = live(calls)
    memory = parameter.data_ptr()
    parameter.data = torch.ones(2, 3)
    parameter.data.mul_(2)
    assert parameter.data_ptr() == memory
    assert parameter.tolist() == [[2.0] * 3] * 2
    assert set(calls) == {"data"}
    for other in (torch.ones(2, 3).double(), torch.ones(3, 2), torch.ones(2, 3, device="meta")):
        with pytest.raises(
            EngineStateError, match=r"first.weight lies in memory of the engine, as torch.float32, \(2, 3\)"
        ):
            parameter.data = other
    parameter.data = parameter.data  # as `model.to(device)` does


def test_while_the_engine_has_its_gradient_it_says_so_and_otherwise_it_has_that_of_pytorch():
    parameter, bucket = live([])
    assert parameter.grad is None
    (parameter * 3).sum().backward()
    assert parameter.grad.tolist() == [[3.0] * 3] * 2
    parameter.grad = None
    bucket.gradient_is_here = True
    for look in (
        lambda: parameter.grad,
        lambda: nn.utils.clip_grad_norm_([parameter], 1.0),
        lambda: set_to_none(parameter),
    ):
        with pytest.raises(EngineStateError, match=r"the gradient of first.weight is in the engine"):
            look()
    bucket.gradient_is_here = False
    with pytest.raises(EngineStateError, match=r"the gradient of first.weight was set by hand"):
        parameter.grad = torch.ones(2, 3)


def set_to_none(parameter: nn.Parameter) -> None:
    parameter.grad = None
