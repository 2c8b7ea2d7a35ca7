"""The bytes an engine says it holds and sends are those of ZeRO's formulas (arXiv 1910.02054, sections 5 and 7)."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads

ADAM: Any = functools.partial(torch.optim.Adam, lr=0.1)
FROZEN, TRAINED = 128 * 64, 64 * 64


class Adapted(nn.Module):
    """A frozen matrix, and a trained one behind it; shards of two ranks and of four have no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(128, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x)).float().square().mean()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_memory_is_that_of_the_paper_for_16_bit_weights_and_fp32_adam_and_known_before_a_step(stage: int, size: int):
    def on_a_rank(world: zerotrain.World) -> list[dict[str, int]]:
        zero = zerotrain.ZeroConfig(stage=stage)
        engine = zerotrain.build_engine(Adapted(), optimizer=ADAM, precision="bf16", zero=zero, world=world)
        planned = engine.planned_nbytes()
        engine.train_step([(torch.ones(1, 128),)])
        held = engine.memory_bytes()
        return [planned, {kind: held[kind] for kind in planned}, held["theory"]]

    expected = {
        "parameters": 2 * (FROZEN + TRAINED) // (size if stage == 3 else 1),
        "gradients": 2 * TRAINED // (size if stage >= 2 else 1),
        "optimizer": 12 * TRAINED // (size if stage >= 1 else 1),
        "offloaded": 0,
    }
    assert run_threads(on_a_rank, size)[0] == [[expected] * 3] * size


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_stage_3_sends_each_weight_for_each_forward_and_backward_and_the_others_once_a_step(stage: int, keeps: bool):
    def on_a_rank(world: zerotrain.World) -> list[int]:
        zero = zerotrain.ZeroConfig(stage=stage, reshard_after_forward=not keeps)
        engine = zerotrain.build_engine(Adapted(), optimizer=ADAM, zero=zero, world=world)
        return [engine.theoretical_sent_nbytes(num_micro_batches) for num_micro_batches in (1, 5)]

    gathered = [TRAINED] * 2
    if stage == 3:
        gathered = [(FROZEN + TRAINED) * (1 if keeps else 2 * number) for number in (1, 5)]
    assert run_threads(on_a_rank, 4)[0] == [[4 * 3 * (TRAINED + numel) // 4 for numel in gathered]] * 4
