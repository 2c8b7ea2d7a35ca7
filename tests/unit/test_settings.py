"""A setting says at its field what it may be and when it has an effect."""

from dataclasses import dataclass, field, fields

import pytest

from zerotrain.settings import (
    EngineConfig,
    OffloadConfig,
    PrecisionConfig,
    Rule,
    ZeroConfig,
    at_least,
    one_of,
    or_null,
    positive,
    problems_in,
    setting,
    settings_in,
)


@dataclass
class Inner:
    depth: int = setting(3, at_least(1, "levels"))


@dataclass
class Outer:
    names: list[str] = setting([], Rule("a list", lambda value: isinstance(value, list)))
    inner: Inner = field(default_factory=Inner)


def test_the_constructors_take_settings_by_position() -> None:
    assert PrecisionConfig("bf16", ["*norm*"], 2.0, 10).growth_interval == 10
    assert ZeroConfig(3, 1.0).bucket_mb == 1.0


def test_a_list_that_is_a_default_is_not_shared() -> None:
    Outer().names.append("x")
    assert Outer().names == []


def test_settings_of_inner_groups_have_dotted_names() -> None:
    assert [(name, value) for name, _, value in settings_in(Outer())] == [("names", []), ("inner.depth", 3)]


def test_a_value_that_breaks_its_rule_is_one_line() -> None:
    assert problems_in(Outer(inner=Inner(0))) == ["inner.depth: got 0; it must be 1 or more levels; the default is 3"]


def test_a_value_that_no_rule_thought_of_breaks_it_too() -> None:
    assert len(problems_in(Outer(inner=Inner("deep")))) == 1  # type: ignore[arg-type]
    assert len(problems_in(ZeroConfig(bucket_mb=10**400))) == 1


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (one_of(0, 1, 2), "0, 1 or 2"),
        (one_of(True, False), "true or false"),
        (at_least(0, "units"), "0 or more units"),
        (or_null(positive("a number"), " for none"), "a number, or null for none"),
    ],
)
def test_a_rule_can_be_read(rule: Rule, allowed: str) -> None:
    assert rule.allowed == allowed


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_positive_number_is_finite(value: float) -> None:
    assert not positive("a number").holds(value)
    assert not or_null(positive("a number")).holds(value)


def test_every_setting_of_an_engine_has_a_rule_that_its_default_keeps() -> None:
    named = {name for name, _, _ in settings_in(EngineConfig())}
    groups = {"zero": ZeroConfig, "precision": PrecisionConfig, "offload": OffloadConfig}
    declared = {f"{group}.{each.name}" for group, kind in groups.items() for each in fields(kind)}
    declared |= {each.name for each in fields(EngineConfig)} - set(groups)
    assert named == declared
    assert problems_in(EngineConfig()) == []
