"""Frozen parameters own nothing but their weights, whenever they were frozen, and changes unseen are answered."""

import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from cases import place, run_over
from torch import nn

import zerotrain
from zerotrain.errors import EngineStateError
from zerotrain.sharding.layout import ALIGN_NUMEL

WIDTH, NUM_LAYERS = 32, 4


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


def call(job: tuple[Callable[[Any], Any], Any]) -> Any:
    function, argument = job
    return function(argument)


@functools.cache
def all_seen() -> list[tuple[Callable[[Any], Any], Any]]:
    """(function, what it returned on each rank) for each argument of each. One start of two ranks for all."""
    jobs = [(function, argument) for function, arguments in ARGUMENTS.items() for argument in arguments]
    return list(zip([function for function, _ in jobs], run_over(jobs, call, 2), strict=True))


def seen_by_ranks(function: Callable[[Any], Any]) -> list[Any]:
    """What `function` returned on each rank, for each of its arguments."""
    return [result for each, result in all_seen() if each is function]


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
    "parameters",
    "memory of frozen parameters",
    "no gradient, master weight or optimizer state, also after a change; nothing of them is reduced",
)
def test_frozen_parameters_own_no_gradient_no_master_weight_and_no_optimizer_state() -> None:
    adapter, norm, frozen = 2 * WIDTH * NUM_LAYERS, 2 * WIDTH, WIDTH * WIDTH * NUM_LAYERS
    results = seen_by_ranks(held_over_changes)
    for (stage, precision), by_rank in zip(ARGUMENTS[held_over_changes], results, strict=True):
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
def test_the_backward_of_stage_3_holds_the_frozen_weights_of_two_units_at_most() -> None:
    for seen in seen_by_ranks(most_full_frozen_nbytes)[0]:
        assert seen["layer"] <= seen["most"] <= 2 * seen["layer"]


def answers(stage: int) -> list[str]:
    """What the engine says to requires_grad changed behind its back, each followed by the right call."""
    messages = []
    for flag, name in ((False, "layers.1.up.weight"), (True, "layers.1.base.weight")):
        engine = build(stage)
        one_step(engine)
        engine.module.get_parameter(name).requires_grad_(flag)
        try:
            one_step(engine)
        except EngineStateError as error:
            messages.append(str(error))
    return messages


@pytest.mark.case(
    "parameters",
    "`requires_grad` changed without a call of the engine",
    "refused in the next backward, with the call to make",
)
def test_requires_grad_changed_behind_the_engines_back_is_answered_with_the_call_to_make() -> None:
    for by_rank in seen_by_ranks(answers):
        for frozen, unfrozen in by_rank:
            assert "layers.1.up.weight was set to False" in frozen
            assert "engine.freeze('layers.1.up.weight')" in frozen
            assert "engine.unfreeze('layers.1.base.weight')" in unfrozen


def buffer_over_a_change(stage: int) -> list[float]:
    """A buffer that each rank fills with its own numbers, as a batch norm does, after a change of what trains."""
    engine = build(stage)
    engine.module.seen.fill_(place()[0] + 1.0)
    engine.freeze("norm.*")
    return engine.module.seen.tolist()


def test_a_change_of_what_trains_leaves_each_rank_its_own_buffers() -> None:
    assert seen_by_ranks(buffer_over_a_change) == [[[1.0] * 3, [2.0] * 3]] * 2


CHANGING = ("layers.[01].down.*", "layers.[01].up.*", "norm.*")


def average_over_changes(stage: int) -> list[dict[str, torch.Tensor]]:
    """Weights and their average after two changes of what trains; {} on all ranks but the first."""
    engine = build(stage)
    engine.keep_average(decay=0.9)
    one_step(engine)
    engine.freeze(*CHANGING)
    one_step(engine)
    engine.unfreeze(*CHANGING)
    one_step(engine)
    weights = engine.full_state_dict()
    with engine.averaged():
        return [weights, engine.full_state_dict()]


def plain_average_over_changes() -> list[dict[str, torch.Tensor]]:
    """The same in plain PyTorch, of which each step computes the gradients of both ranks."""
    torch.manual_seed(0)
    model = Adapters()
    weights = dict(model.named_parameters())
    changing = [name for name in weights if any(fnmatchcase(name, pattern) for pattern in CHANGING)]
    optimizer = torch.optim.AdamW(weights.values())
    average: dict[str, torch.Tensor] = {}
    for step, trains in enumerate((True, False, True)):
        for name in changing:
            weights[name].requires_grad_(trains)
            average.pop(name, None)
            if step == 2:
                average[name] = weights[name].detach().clone()  # new to its average, and to the optimizer
                optimizer.state.pop(weights[name])
        trained = [each for each in weights.values() if each.requires_grad]
        losses = [
            model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))).pow(3).mean() for rank in (0, 1)
        ]
        for each, one, other in zip(trained, *(torch.autograd.grad(loss, trained) for loss in losses), strict=True):
            each.grad = (one + other) / 2
        optimizer.step()
        for name, weight in weights.items():
            weight.grad = None
            if weight.requires_grad:
                share = 1 - min(0.9, (1 + step) / (10 + step))
                average[name] = average.get(name, weight.detach()).lerp(weight.detach(), share)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [state, state | average]


def test_weights_and_average_over_changes_of_what_trains_are_those_of_plain_pytorch() -> None:
    """The adapters of two layers come first in new buckets, behind matrices that stay frozen."""
    expected = plain_average_over_changes()
    for by_rank in seen_by_ranks(average_over_changes):
        for got, wanted in zip(by_rank[0], expected, strict=True):
            assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


ARGUMENTS: dict[Callable[[Any], Any], list[Any]] = {
    held_over_changes: [(stage, precision) for precision in ("fp32", "bf16") for stage in range(4)],
    most_full_frozen_nbytes: [3],
    answers: [0, 1, 2, 3],
    buffer_over_a_change: [1, 3],
    average_over_changes: [0, 1, 2, 3],
}
