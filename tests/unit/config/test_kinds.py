"""A value of another kind than a class takes is named, with what it takes."""

from typing import Any, Optional

import pytest

from zerotrain.config.checks import target_problems

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True}


def takes_much(
    size: int,
    *,
    names: list[str],
    pair: tuple[int, int] = (1, 2),
    rate=0.1,
    path: "NotHere" = None,  # type: ignore[name-defined] # noqa: F821
) -> None:
    """An annotation that cannot be read, so none counts, and the defaults speak."""


def problems(values: dict[str, Any]) -> list[str]:
    return list(target_problems(values, name="optimizer"))


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("lr", "abc", "a number; its default is 0.001"),
        ("lr", True, "a number; its default is 0.001"),
        ("lr", None, "a number; its default is 0.001"),
        ("betas", 3, "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("betas", [0.9], "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("betas", [0.9, "x"], "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("weight_decay", [1], "a number; its default is 0.01"),
        ("fused", "maybe", "true or false or null; its default is null"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_is_taken(name: str, value: Any, takes: str) -> None:
    [line] = problems(ADAMW | {name: value})
    assert line.startswith(f"optimizer.{name}: got ")
    assert line.endswith(f"; torch.optim.AdamW takes {takes}")


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 1},
        {"betas": [0, 1]},
        {"fused": None},
        {"fused": True},
        {"lr": {"_target_": "torch.ones"}},
        {"foreach": False},
    ],
)
def test_what_a_class_can_take_is_left_to_it(values: dict[str, Any]) -> None:
    assert [line for line in problems(ADAMW | values) if "takes" in line] == []


def test_a_whole_number_may_come_as_a_float_and_no_other() -> None:
    linear = {"_target_": "torch.nn.Linear", "in_features": 3.0, "out_features": 2}
    assert problems(linear) == []
    [line] = problems(linear | {"out_features": 2.5})
    assert line == "optimizer.out_features: got 2.5; torch.nn.Linear takes a whole number"


def takes_numbers(
    whole: int,
    maybe: int | None = None,
    old: Optional[int] = None,  # noqa: UP045
    either: int | float = 0,
    some: list[int] = (),  # type: ignore[assignment]
    each: tuple[int, ...] = (),
    pair: tuple[int, float] = (0, 0.0),
    real: float = 0.0,
    counted=2,
    weighed=0.5,
) -> None:
    """Numbers of each kind."""


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    "name", ["whole", "maybe", "old", "either", "some", "each", "pair", "real", "counted", "weighed"]
)
def test_true_and_false_are_no_numbers(monkeypatch: pytest.MonkeyPatch, name: str, value: bool) -> None:
    """`model.num_layers=true` would be 1."""
    monkeypatch.setattr("torch.nn.takes_numbers", takes_numbers, raising=False)
    values = {"_target_": "torch.nn.takes_numbers", "whole": 3}
    given = {"some": [value], "each": [1, value], "pair": [value, 0.5]}.get(name, value)
    [line] = problems(values | {name: given})
    assert line.startswith(f"optimizer.{name}: got ")
    right = {"some": [1], "each": [1, 2], "pair": [1, 0.5]}.get(name, 1)
    assert problems(values | {name: right}) == []


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "max_seq_len", "num_heads"])
def test_true_is_no_size_of_a_model(name: str) -> None:
    target = "zerotrain.models.GPT"
    values = {"vocab_size": 8, "max_seq_len": 8, "num_layers": 1, "num_heads": 1, "hidden_size": 8}
    lines = list(target_problems({"_target_": target, **values, name: True}, name="model"))
    assert f"model.{name}: got true; {target} takes a whole number" in [line.partition("; its")[0] for line in lines]


def test_what_cannot_be_read_of_a_class_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.takes_much", takes_much, raising=False)
    values = {"_target_": "torch.nn.takes_much", "size": "x", "names": 3, "pair": "y", "path": 3}
    assert problems(values) == []
    assert problems(values | {"rate": "z"}) == [
        "optimizer.rate: got z; torch.nn.takes_much takes a number; its default is 0.1"
    ]
