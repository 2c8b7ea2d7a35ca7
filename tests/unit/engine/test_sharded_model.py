"""What a build does with a model: it looks at all of it a few times, however many things it looks for."""

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.sharding.units import walk
from zerotrain.testing.fake_wire import run_threads

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
def test_a_build_walks_over_the_model_four_times_at_most(stage, settings):
    zero = zerotrain.ZeroConfig(stage=stage)
    assert walks_of_a_build(Counting(), zero=zero, **settings) <= MAX_WALKS
    assert walks_of_a_build(Counting, zero=zero, **settings) <= MAX_WALKS


def test_what_a_walk_finds_is_what_torch_finds():
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


# The bytes that a rank is told to hold and to send are those that it does: in whole shards, to the byte.


FROZEN, TRAINED = 256 * 256, 64 * 64
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Adapted(nn.Module):
    """A frozen matrix, and a trained one beside it; shards of two ranks and of four have no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(256, 256, bias=False), nn.Linear(64, 64, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x)[:, :64]).square().mean()


@pytest.mark.case(
    "stages", "bytes it sends", "those of state that was sharded and becomes full; none without such state"
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("precision", "optimizer", "each_trained"),
    [("fp32", SGD, 0), ("bf16", SGD, 4), ("fp32", functools.partial(SGD, momentum=0.9), 4)],
    ids=["SGD", "bf16", "momentum"],
)
def test_a_change_of_the_stage_sends_what_it_says(precision, optimizer, each_trained, size):
    """`each_trained`: bytes of an element that the optimizer keeps and the change to stage 0 moves."""

    def on_a_rank(world: zerotrain.World) -> list[zerotrain.StageSwitch]:
        zero = zerotrain.ZeroConfig(stage=3)
        engine = zerotrain.build_engine(Adapted(), optimizer=optimizer, precision=precision, zero=zero, world=world)
        engine.backward(engine(torch.ones(1, 256)))
        engine.step()
        return [engine.set_stage(stage) for stage in (2, 3, 0)]

    itemsize = 4 if precision == "fp32" else 2
    weights = (FROZEN + TRAINED) * itemsize
    theory = [nbytes * (size - 1) // size for nbytes in (weights, 0, weights + TRAINED * each_trained)]
    for switches in run_threads(on_a_rank, size)[0]:
        assert [each.theory_sent_nbytes for each in switches] == theory
        assert all(0 <= each.sent_nbytes - each.theory_sent_nbytes < 1000 for each in switches)
