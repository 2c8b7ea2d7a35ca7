"""The bytes that a rank is told to hold and to send are those that it does: in whole shards, to the byte."""

import functools

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.testing.fake_wire import run_threads

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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("precision", "optimizer", "each_trained"),
    [("fp32", SGD, 0), ("bf16", SGD, 4), ("fp32", functools.partial(SGD, momentum=0.9), 4)],
    ids=["SGD", "bf16", "momentum"],
)
def test_a_change_of_the_stage_sends_what_it_says(
    precision: str, optimizer: object, each_trained: int, size: int
) -> None:
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
