import pytest
import torch
from torch import nn

from zerotrain.engine.lazy_parameter import LazyParameter


def lazy(calls: list[str]) -> LazyParameter:
    original = nn.Parameter(torch.arange(6.0).view(2, 3))
    return LazyParameter.around(original, lambda: calls.append("completed"))


def test_what_describes_a_parameter_can_be_read_without_it() -> None:
    calls: list[str] = []
    parameter = lazy(calls)
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.numel()) == ((2, 3), torch.float32, 6)
    assert parameter.device == torch.device("cpu")
    assert parameter.requires_grad
    assert calls == []


def test_arithmetic_completes_it_first_and_gives_gradients_to_the_original() -> None:
    calls: list[str] = []
    parameter = lazy(calls)
    torch.nn.functional.linear(torch.ones(1, 3), parameter).sum().backward()
    assert calls == ["completed"]
    assert torch.equal(parameter.original.grad, torch.ones(2, 3))


def test_it_is_completed_inside_nested_arguments_too() -> None:
    calls: list[str] = []
    joined = torch.cat([lazy(calls), torch.zeros(2, 3)])
    assert joined.shape == (4, 3)
    assert calls == ["completed"]


def test_what_cannot_be_completed_raises_where_it_is_read() -> None:
    def refuse() -> None:
        raise RuntimeError("sharded at rest")

    parameter = LazyParameter.around(nn.Parameter(torch.ones(2)), refuse)
    with pytest.raises(RuntimeError, match="sharded at rest"):
        parameter + 1
