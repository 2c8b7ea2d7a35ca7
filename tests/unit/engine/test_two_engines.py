"""Two engines that train against each other (GAN), in one process, with threads as ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import assert_same, on_ranks, seeded
from zerotrain.comm.world import World
from zerotrain.errors import EngineStateError

MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUM_STEPS = 3


class Layers(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.input = nn.Linear(num_inputs, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.output(x)


def drawn(step: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * width + 10 * step + rank))


def away_from(value: float, scores: torch.Tensor) -> torch.Tensor:
    return (scores.float() - value).square().mean()


def models() -> list[nn.Module]:
    return [seeded(functools.partial(Layers, 8, 6)), seeded(functools.partial(Layers, 6, 1))]


def engines(world: World, stage: int, precision: str) -> list[zerotrain.ZeroEngine]:
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=0.0005, reduction="ordered")
    return [
        zerotrain.build_engine(model, optimizer=MOMENTUM, zero=zero, precision=precision, world=world)
        for model in models()
    ]


def adversaries(world: World, stage: int, precision: str) -> list[dict[str, torch.Tensor]]:
    generator, critic = engines(world, stage, precision)
    for step in range(NUM_STEPS):
        images = generator(drawn(step, world.rank, 8))
        loss = away_from(1.0, critic(drawn(step, world.rank, 6))) + away_from(0.0, critic(images.detach()))
        critic.backward(loss)
        critic.step()
        with critic.forward_scope():
            seen = images.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(away_from(1.0, critic.module(seen)), seen)
        generator.backward((images * gradient).sum())
        generator.step()
    return [generator.full_state_dict(), critic.full_state_dict()]


def plain(size: int) -> list[dict[str, torch.Tensor]]:
    generator, critic = models()
    optimizers = {model: MOMENTUM(model.parameters()) for model in (generator, critic)}

    def step_of(model: nn.Module, losses: list[torch.Tensor]) -> None:
        weights = list(model.parameters())
        each = [torch.autograd.grad(loss, weights) for loss in losses]
        for weight, parts in zip(weights, zip(*each, strict=True), strict=True):
            weight.grad = sum(parts, torch.zeros_like(weight)) / size
        optimizers[model].step()

    for step in range(NUM_STEPS):
        images = [generator(drawn(step, rank, 8)) for rank in range(size)]
        reals = [drawn(step, rank, 6) for rank in range(size)]
        both = zip(reals, images, strict=True)
        step_of(critic, [away_from(1.0, critic(real)) + away_from(0.0, critic(fake.detach())) for real, fake in both])
        step_of(generator, [away_from(1.0, critic(fake)) for fake in images])
    return [dict(model.state_dict()) for model in (generator, critic)]


@pytest.mark.case("optimizers", "two engines against each other (GAN)", "same bits, see below")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thinned(2, first=1)
def test_a_generator_and_its_critic_train_as_in_plain_pytorch(size, precision):
    """To the bit; in bf16 the stages alike, and as plain PyTorch in fp32 but for rounding."""
    expected = plain(size)
    by_stage = []
    for stage in range(4):
        run = functools.partial(adversaries, stage=stage, precision=precision)
        by_stage.append(run_threads(run, size, late_rank=0)[0][0])
    for trained in by_stage:
        for got, same, weights in zip(trained, by_stage[0], expected, strict=True):
            assert_same(got, weights if precision == "fp32" else same)
            for name, value in weights.items():
                assert torch.allclose(got[name], value, atol=1e-5 if precision == "fp32" else 0.01), name


@pytest.mark.case("optimizers", "a backward through another engine's model, or a loss over both", "refused")
@pytest.mark.parametrize("through", ["the other's model", "both models"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_backward_through_another_engines_model_is_refused_and_the_next_step_works(world, stage, through):
    generator, critic = engines(world, stage, "fp32")
    images = generator(drawn(0, world.rank, 8))
    if through == "both models":
        loss = images.square().mean() + away_from(1.0, critic(drawn(0, world.rank, 6)))
    else:
        loss = away_from(1.0, critic(images))
    answer = r"outside engine\.backward.* build one engine of both, as an nn\.ModuleList of them"
    with pytest.raises(EngineStateError, match=answer if stage < 3 else "between engine calls"):
        generator.backward(loss)
    critic.backward(away_from(1.0, critic(drawn(0, world.rank, 6))))
    critic.step()
    generator.backward(generator(drawn(0, world.rank, 8)).sum())
    generator.step()
