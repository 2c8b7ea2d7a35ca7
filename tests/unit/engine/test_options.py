"""What ranks compare of what an engine is told: everything."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from zerotrain.comm.world import World
from zerotrain.device.kinds import rehearsing
from zerotrain.engine.options import EngineOptions, shard_size_of
from zerotrain.errors import ConfigError
from zerotrain.settings import EngineConfig, PrecisionConfig, ZeroConfig, settings_in
from zerotrain.sharding.bucketing import cut_buckets
from zerotrain.sharding.units import ManagedParameter, cut_units, walk

GIVEN = EngineConfig(precision=PrecisionConfig("fp16"))
CHANGED = {
    "zero.stage": 1,
    "zero.bucket_mb": 1.0,
    "zero.reduction": "native",
    "zero.accumulate": "reduced",
    "zero.units": ["blocks.*"],
    "precision.name": "bf16",
    "precision.keep_fp32": ["*norm*"],
    "precision.state": "bf16",
    "precision.matmul": "fp8",
    "precision.fp8_modules": ["*.mlp.*"],
    "offload.optimizer": "cpu",
    "offload.parameters": "disk",
    "offload.activations": "cpu",
    "offload.update": "host",
    "graphs": "auto",
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
def test_any_setting_that_differs_is_seen_and_named(name):
    one, other = options(GIVEN).settings(), options(changed(name)).settings()
    assert one.keys() == other.keys()
    assert [key for key in one if one[key] != other[key]] == [name]


def test_auto_is_compared_by_what_it_comes_to():
    automatic = options(EngineConfig())
    assert automatic.settings() == options(EngineConfig(ZeroConfig(reduction="ordered"))).settings()
    on_gpu = options(EngineConfig(), device="cuda").settings()
    assert [key for key, value in on_gpu.items() if value != automatic.settings()[key]] == ["zero.reduction"]


def sizes_of_buckets(given: EngineConfig, block: Callable[[], nn.Module], *, on_host: bool) -> list[int]:
    """MiB of each, of a model of three blocks."""
    with rehearsing(on_host=on_host), torch.device("meta"):
        model = nn.Sequential(*(block() for _ in range(3)))
        resolved = options(given, "meta")
    units = cut_units(walk(model), None, resolved.bucket_numel)
    managed = [
        replace(unit, parameters=[ManagedParameter(**vars(each), dtype=torch.bfloat16) for each in unit.parameters])
        for unit in units
    ]
    specs = cut_buckets(managed, resolved.bucket_numel_for(managed))
    return [sum(each.parameter.numel() for each in spec.parameters) // 2**19 for spec in specs]


def test_buckets_that_are_left_to_the_device_hold_a_unit_on_a_gpu_and_25_mib_on_a_cpu():
    """With the last unit cut smaller, as ever."""

    def block() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(10)))  # 8 MiB each in bf16

    def huge() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2**14, 2**12, bias=False) for _ in range(8)))  # 128 MiB each

    given = EngineConfig(ZeroConfig(), precision=PrecisionConfig("bf16"))
    assert sizes_of_buckets(given, block, on_host=False) == [80, 80, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    assert max(sizes_of_buckets(given, block, on_host=True)) == 24
    assert sizes_of_buckets(replace(given, zero=ZeroConfig(bucket_mb=25.0)), block, on_host=False)[:2] == [24, 24]
    assert sizes_of_buckets(given, huge, on_host=False)[:2] == [512, 512]
    small = sizes_of_buckets(given, lambda: nn.Linear(16, 16), on_host=False)
    assert small == [0]


@pytest.mark.parametrize(
    ("shard_size", "hosts", "problem"),
    [
        (8, [0] * 4, "zero.shard_size=8: does not divide the 4 ranks; give 2 or 4 or null for all"),
        (2, [0] * 3, "zero.shard_size=2: does not divide the 3 ranks; give null for all"),
        ("host", [0] * 3 + [1] * 3, "zero.shard_size='host': a host has 3 of 6 ranks; give 2 or null for all"),
    ],
)
def test_ranks_that_cannot_be_cut_so_are_refused_with_what_can(shard_size, hosts, problem):
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
        shard_size_of(shard_size, len(hosts), hosts)
