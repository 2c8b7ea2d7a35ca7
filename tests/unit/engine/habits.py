"""The same training in plain PyTorch and with an engine on each of some threads."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import DTYPES, Losses, Plain, seeded

SGD = functools.partial(torch.optim.SGD, lr=0.1)
LOSS_SCALE = 256.0
"""In fp16."""
MicroBatches = Callable[[int, int], list[tuple[tuple[torch.Tensor, ...], float]]]
"""(step, rank) -> the inputs of the model, which returns the loss, and the weight of each micro-batch."""
EVERYWHERE = pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, ("fp32", "bf16")[(stage + size) % 2]) for stage in range(4) for size in (2, 3)],
)
"""Each stage with each number of ranks and with each precision, and these two with each other."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x) if state is None else self.first(x) + state
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def build(
    world: zerotrain.World, stage: int, precision: str, model: nn.Module | None = None, **settings: bool
) -> zerotrain.ZeroEngine:
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=0.0005, reduction="ordered")
    given = zerotrain.PrecisionConfig(precision, initial_scale=LOSS_SCALE)
    model = seeded(Net) if model is None else model
    return zerotrain.build_engine(model, optimizer=SGD, zero=zero, precision=given, world=world, **settings)


def in_plain_pytorch(
    make: Callable[[], nn.Module],
    micro_batches: MicroBatches,
    size: int,
    precision: str,
    cast: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 2,
    rounds_inputs: bool = True,
) -> dict[str, torch.Tensor]:
    """The weights after training in one process; see `Plain`.

    Args:
        rounds_inputs: False: the model does, where it must.
    """

    def losses(model: nn.Module, step: int, rank: int) -> Losses:
        for inputs, weight in micro_batches(step, rank):
            if rounds_inputs:
                inputs = [each.to(DTYPES[precision]) if each.is_floating_point() else each for each in inputs]
            yield model(*inputs), weight

    scale = LOSS_SCALE if precision == "fp16" else 1.0
    return Plain(size, make, SGD, precision, losses=losses, cast=cast, scale=scale).train(*range(steps))


def in_our_engine(
    make: Callable[[], nn.Module], micro_batches: MicroBatches, size: int, stage: int, precision: str, steps: int = 2
) -> dict[str, torch.Tensor]:
    """The same with an engine on each rank, the last of which is late; and what each returned is a number."""

    def train(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = build(world, stage, precision, seeded(make))
        for step in range(steps):
            inputs, weights = zip(*micro_batches(step, world.rank), strict=True)
            result = engine.train_step(inputs, weights=weights)
            assert not result.skipped
            assert result.loss.isfinite()
        return engine.full_state_dict()

    return run_threads(train, size, late_rank=size - 1)[0][0]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
