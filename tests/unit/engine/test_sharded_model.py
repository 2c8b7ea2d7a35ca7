"""What a build does with a model: it looks at all of it a few times, however many things it looks for."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.sharding.units import walk

MAX_WALKS = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01)
OFFLOADED = zerotrain.OffloadConfig(optimizer="cpu", activations="cpu")


class Counting(nn.Module):
    """Counts how often somebody begins to go over all of it: torch's own ways all come by here."""

    num_walks = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))

    def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        self.num_walks += 1
        return super().named_modules(*given, **named)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        mean: torch.Tensor = self.last(hidden).mean()
        return mean


def walks_of_a_build(make: Any, **settings: Any) -> int:
    engine = zerotrain.build_engine(make, optimizer=ADAMW, **settings)
    walks = engine.module.num_walks
    engine.train_step([(torch.ones(2, 4),)])
    assert isinstance(walks, int)
    return walks


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": zerotrain.PrecisionConfig("bf16", keep_fp32=["blocks.*.1"])},
        {"activation_checkpointing": True, "offload": OFFLOADED},
        {"param_groups": [{"params": ["*"]}]},
    ],
    ids=["plain", "bf16, norms kept", "activations off the device", "groups"],
)
def test_a_build_walks_over_the_model_four_times_at_most(stage: int, settings: dict[str, Any]) -> None:
    zero = zerotrain.ZeroConfig(stage=stage)
    assert walks_of_a_build(Counting(), zero=zero, **settings) <= MAX_WALKS
    assert walks_of_a_build(Counting, zero=zero, **settings) <= MAX_WALKS


@pytest.mark.parametrize(
    "way", ["named_modules", "modules", "named_parameters", "parameters", "named_buffers", "buffers"]
)
def test_each_way_to_walk_is_counted(way: str) -> None:
    model = Counting()
    list(getattr(model, way)())
    assert model.num_walks == 1


def test_what_a_walk_finds_is_what_torch_finds() -> None:
    model = Counting()
    model.tied, model.also = model.first.weight, model.blocks[0]  # type: ignore[assignment]
    walked = walk(model)
    assert dict(walked.modules) == dict(model.named_modules())
    assert {each.names[0]: each.parameter for each in walked.parameters} == dict(model.named_parameters())
    assert dict(walked.buffers) == dict(model.named_buffers())
    assert list(walked.modules) == [name for name, _ in model.named_modules()]
    every = dict(model.named_parameters(remove_duplicate=False))
    assert {name: each.parameter for each in walked.parameters for name in each.names} == every
    holding = [name for name, module in model.named_modules() if next(module.parameters(), None) is not None]
    assert [name for name in walked.modules if name in walked.inside] == holding
    for name in holding:
        inside = {of.parameter for _, of in walked.inside[name]}
        assert inside == set(model.get_submodule(name).parameters())
