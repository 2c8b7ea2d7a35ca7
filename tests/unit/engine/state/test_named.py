"""Full weights that were taken out stay what they are."""

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import alone


class Normed(nn.Module):
    """With a buffer that each forward writes to, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).pow(3).mean()


@pytest.mark.parametrize("stage", range(4))
def test_neither_weights_nor_buffers_of_a_state_dict_follow_the_training(stage):
    zero = zerotrain.ZeroConfig(stage=stage)
    engine = zerotrain.build_engine(Normed(), optimizer=torch.optim.SGD, zero=zero, world=alone())
    state = engine.full_state_dict()
    before = {name: value.clone() for name, value in state.items()}
    assert "norm.running_mean" in before
    assert "scratch" not in before
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    after = engine.full_state_dict()
    assert [name for name in before if torch.equal(after[name], before[name])] == []
