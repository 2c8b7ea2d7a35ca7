"""What ranks compare of what an engine is told: everything."""

from dataclasses import replace

import pytest
import torch

from zerotrain.comm.ranks.world import World
from zerotrain.engine.options import EngineOptions
from zerotrain.settings import EngineConfig, PrecisionConfig, ZeroConfig, settings_in

GIVEN = EngineConfig(precision=PrecisionConfig("fp16"))
CHANGED = {
    "zero.stage": 1,
    "zero.reduction": "native",
    "zero.accumulate": "reduced",
    "zero.units": ["blocks.*"],
    "precision.name": "bf16",
    "precision.keep_fp32": ["*norm*"],
    "offload.optimizer": "cpu",
    "offload.parameters": "disk",
    "offload.activations": "cpu",
    "offload.update": "host",
    "offload.heap": "return",
}
"""Where 1 cannot be added to a value."""


def options(given: EngineConfig, device: str = "cpu", size: int = 2) -> EngineOptions:
    return EngineOptions.resolve(given, World(rank=0, size=size, local_rank=0, device=torch.device(device)))


def changed(name: str) -> EngineConfig:
    """`GIVEN` with another value of one setting."""
    group, _, last = name.rpartition(".")
    holder = getattr(GIVEN, group) if group else GIVEN
    value = CHANGED[name] if name in CHANGED else (getattr(holder, last) or 0) + 1
    holder = replace(holder, **{last: value})
    return replace(GIVEN, **{group: holder}) if group else holder


@pytest.mark.parametrize("name", [name for name, _, _ in settings_in(GIVEN)])
def test_any_setting_that_differs_is_seen_and_named(name: str) -> None:
    one, other = options(GIVEN).settings(), options(changed(name)).settings()
    assert one.keys() == other.keys()
    assert [key for key in one if one[key] != other[key]] == [name]


def test_auto_is_compared_by_what_it_comes_to() -> None:
    automatic = options(EngineConfig())
    assert automatic.settings() == options(EngineConfig(ZeroConfig(reduction="ordered"))).settings()
    on_gpu = options(EngineConfig(), device="cuda").settings()
    assert [key for key, value in on_gpu.items() if value != automatic.settings()[key]] == ["zero.reduction"]


def test_a_loss_scale_is_made_where_it_is_needed() -> None:
    scaler = options(EngineConfig(precision=PrecisionConfig("fp16", initial_scale=8.0))).loss_scaler()
    assert scaler is not None
    assert scaler.scale == 8.0
    assert options(EngineConfig(precision=PrecisionConfig("bf16"))).loss_scaler() is None


def test_units_are_patterns_or_found() -> None:
    assert options(EngineConfig()).zero.unit_patterns is None
    assert options(EngineConfig(ZeroConfig(units=["blocks.*"]))).zero.unit_patterns == ["blocks.*"]
