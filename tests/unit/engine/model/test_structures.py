from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from zerotrain.engine.model.precision import cast_floating, map_tensors, tensors_in


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    tensor: Any
    note: str = "a note"


@dataclass
class Derived:
    """Its constructor takes other arguments than it has fields, and its field may be missing."""

    start: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.start * 2


class Output(dict):
    """A dict subclass that pytree does not know."""

    label = "kept"


def tensor() -> torch.Tensor:
    return torch.ones(2)


STRUCTURES = {
    "a tensor": tensor(),
    "a dict": {"a": tensor(), "b": 3},
    "an ordered dict": OrderedDict(a=tensor()),
    "a dict subclass": Output(a=tensor(), b=[tensor()]),
    "a named tuple": Pair(tensor(), "text"),
    "a dataclass": Derived(tensor()),
    "a frozen dataclass": Frozen(tensor()),
    "nested lists": [[tensor()], (tensor(), None)],
    "all of them nested": Frozen({"a": Pair(Output(x=Derived(tensor())), [tensor()])}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tensor_is_found_and_mapped_in_a_container_of_the_same_type(name: str) -> None:
    given = STRUCTURES[name]
    found = list(tensors_in(given))
    assert len(found) > 0
    doubled = map_tensors(lambda value: value * 2, given)
    assert type(doubled) is type(given)
    assert [torch.equal(after, 2 * before) for after, before in zip(tensors_in(doubled), found, strict=True)] == [
        True
    ] * len(found)
    assert all(after is before for after, before in zip(tensors_in(given), found, strict=True))  # nothing in place


def test_what_is_no_tensor_passes_through() -> None:
    mapped = map_tensors(lambda value: value * 2, STRUCTURES["all of them nested"])
    assert mapped.note == "a note"
    assert map_tensors(torch.neg, Frozen).__name__ == "Frozen"  # the class itself is no container
    assert map_tensors(torch.neg, [1, "two", None]) == [1, "two", None]


def test_a_container_whose_tensors_stay_the_same_is_the_same_object() -> None:
    for given in (Frozen(torch.arange(3)), Output(a=torch.arange(3)), Derived(3)):
        assert cast_floating(given, torch.float16) is given


def test_floating_tensors_are_cast_and_all_others_are_not() -> None:
    given = {
        "half": torch.ones(1, dtype=torch.float16),
        "double": torch.ones(1, dtype=torch.float64),
        "ids": torch.ones(1, dtype=torch.int64),
        "mask": torch.ones(1, dtype=torch.bool),
        "complex": torch.ones(1, dtype=torch.complex64),
    }
    got = cast_floating(given, torch.bfloat16)
    assert {name: value.dtype for name, value in got.items()} == {
        "half": torch.bfloat16,
        "double": torch.bfloat16,
        "ids": torch.int64,
        "mask": torch.bool,
        "complex": torch.complex64,
    }
