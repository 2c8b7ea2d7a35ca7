"""Frozen parameters own nothing but their weights, whenever they were frozen."""

from typing import Any

import pytest
import torch
from cases import Answers, answers_of, place
from torch import nn

import zerotrain
from zerotrain.sharding.layout import ALIGN_NUMEL

WIDTH, NUM_LAYERS = 32, 4
STAGES_AND_PRECISIONS = [(stage, precision) for precision in ("fp32", "bf16") for stage in range(4)]


class Adapted(nn.Module):
    """A frozen matrix and an adapter of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.up(self.down(x))).tanh()


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build(stage: int, precision: str = "fp32") -> zerotrain.ZeroEngine:
    torch.manual_seed(0)
    # Buckets of one layer's frozen matrix each.
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=WIDTH * WIDTH * 4 / 2**20, reduction="ordered", prefetch=0)
    return zerotrain.build_engine(Adapters(), optimizer=torch.optim.AdamW, zero=zero, precision=precision)


def one_step(engine: zerotrain.ZeroEngine) -> None:
    generator = torch.Generator().manual_seed(place()[0])
    engine.backward(engine(torch.randn(8, WIDTH, generator=generator)).float().pow(3).mean())
    engine.step()


@pytest.fixture(scope="module")
def answers(once: Any) -> Answers:
    values = {held_over_changes: STAGES_AND_PRECISIONS, most_full_frozen_nbytes: [3], buffer_over_a_change: [1, 3]}
    return answers_of(values, once)


def held_over_changes(how: tuple[int, str]) -> dict[str, Any]:
    """What a rank holds after a step with adapters, with the first half of them frozen, and with them unfrozen again;
    and the bytes of the reductions of the first."""
    engine = build(*how)
    one_step(engine)
    sent = engine.ledger.last_step.nbytes["reduce"]
    first = engine.memory_bytes()
    engine.freeze("layers.[01].*", "norm.*")
    between = engine.memory_bytes()
    one_step(engine)
    frozen = engine.memory_bytes()
    engine.unfreeze("layers.[01].up.*", "layers.[01].down.*", "norm.*")
    one_step(engine)
    return {"first": first, "between": between, "frozen": frozen, "again": engine.memory_bytes(), "sent": sent}


@pytest.mark.case(
    "models: Models and optimizers", "LoRA", "trained parameters alone in gradients, optimizer state and reductions"
)
@pytest.mark.case("parameters", "what is frozen until a step", "sends no gradient until then")
@pytest.mark.case(
    "parameters",
    "memory of frozen parameters",
    "no gradient, master weight or optimizer state, also after a change; nothing of them is reduced",
)
def test_frozen_parameters_own_no_gradient_no_master_weight_and_no_optimizer_state(answers: Answers) -> None:
    adapter, norm, frozen = 2 * WIDTH * NUM_LAYERS, 2 * WIDTH, WIDTH * WIDTH * NUM_LAYERS
    for (stage, precision), by_rank in zip(STAGES_AND_PRECISIONS, answers(held_over_changes), strict=True):
        itemsize, state = {"fp32": (4, 8), "bf16": (2, 12)}[precision]
        for held in by_rank:
            for moment, trained in (("first", adapter + norm), ("frozen", adapter // 2), ("again", adapter + norm)):
                theory = held[moment]["theory"]
                assert theory["parameters"] == (frozen + adapter + norm) * itemsize // (1 if stage < 3 else 2)
                assert theory["gradients"] == trained * itemsize // (1 if stage < 2 else 2)
                assert theory["optimizer"] == trained * state // (1 if stage < 1 else 2)
                padding = (2 * NUM_LAYERS + 2 + NUM_LAYERS * 2) * ALIGN_NUMEL
                assert held[moment]["gradients"] <= theory["gradients"] + padding * itemsize
                assert held[moment]["optimizer"] <= theory["optimizer"] + padding * state
                assert held[moment]["optimizer"] < frozen * 4
            for kind in ("parameters", "gradients", "optimizer"):
                assert held["between"][kind] == held["frozen"][kind]
                assert held["again"][kind] >= held["first"][kind] > 0
            assert held["sent"] <= (adapter + norm + padding) * itemsize


def most_full_frozen_nbytes(stage: int) -> dict[str, int]:
    """Bytes of frozen weights that are whole at once, seen from the backward of each layer."""
    engine = build(stage)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        frozen = [bucket.weights for bucket in engine.schedule.buckets if not bucket.spec.trainable]
        most = max(most, sum(weights.model_weight.held_nbytes for weights in frozen))

    for layer in engine.module.layers:
        layer.base.register_full_backward_hook(look)
    one_step(engine)
    return {"most": most, "layer": WIDTH * WIDTH * 4}


@pytest.mark.case("parameters", "frozen units at stage 3", "at most two of them are full in the backward")
def test_the_backward_of_stage_3_holds_the_frozen_weights_of_two_units_at_most(answers: Answers) -> None:
    for seen in answers(most_full_frozen_nbytes)[0]:
        assert seen["layer"] <= seen["most"] <= 2 * seen["layer"]


def buffer_over_a_change(stage: int) -> list[float]:
    """A buffer that each rank fills with its own numbers, as a batch norm does, after a change of what trains."""
    engine = build(stage)
    engine.module.seen.fill_(place()[0] + 1.0)
    engine.freeze("norm.*")
    return engine.module.seen.tolist()


def test_a_change_of_what_trains_leaves_each_rank_its_own_buffers(answers: Answers) -> None:
    assert answers(buffer_over_a_change) == [[[1.0] * 3, [2.0] * 3]] * 2
