"""The compiled AdamW beside torch's, in parts, over stages and ranks, and what it refuses."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.bits.test_compiled import needs_compiler
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Linears, alone, engine_on, inputs
from zerotrain.comm.world import World
from zerotrain.engine.buckets.compiled_update import update_span

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GROUP |= {"amsgrad": False, "maximize": False, "differentiable": False}
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
NUMEL, BORDERS = 64 * 100, (64, 64 * 37)


@needs_compiler
def test_it_follows_torchs_adamw_and_has_the_same_bits_in_parts_and_leaves_a_step_out_that_is_off():
    torch.manual_seed(0)
    target, factor = torch.randn(NUMEL), torch.tensor(0.3)
    of_torch, weight, state = nn.Parameter(target.clone()), target.bfloat16(), {}
    optimizer = torch.optim.AdamW([of_torch], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    slices = [slice(0, BORDERS[0]), slice(*BORDERS), slice(BORDERS[1], NUMEL)]
    parts, of_parts, states = target.clone(), weight.clone(), [{} for _ in slices]
    for is_off in (0.0, 0.0, 1.0, 0.0):
        gradient, off = torch.randn(NUMEL).bfloat16(), torch.tensor(is_off)
        update_span(state, GROUP, target, gradient, weight, factor, off)
        for part, of_part in zip(slices, states, strict=True):
            update_span(of_part, GROUP, parts[part], gradient[part], of_parts[part], factor, off)
        if not is_off:
            of_torch.grad = gradient.float() * factor
            optimizer.step()
        torch.testing.assert_close(target, of_torch.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(parts, target)
        assert torch.equal(of_parts, weight)
        assert torch.equal(weight, target.bfloat16())
    kept = optimizer.state[of_torch]
    assert state.keys() == kept.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, kept[name], rtol=1e-5, atol=1e-7)
    assert state["step"].item() == 3


def train(world: World, *, stage: int, bucket_mb: float, precision: str, compiled: bool = True) -> dict[str, Any]:
    zero = {"stage": stage, "bucket_mb": bucket_mb, "compiled_update": compiled}
    engine = engine_on(world, Linears, optimizer=ADAMW, zero=zero, precision=precision, max_grad_norm=0.5)
    engine.keep_average(decay=0.5)
    for step in range(3):
        engine.train_step([(inputs(step, world.rank),)])
    with engine.averaged():
        average = engine.full_state_dict()
    return engine.full_state_dict() | {f"average of {name}": value for name, value in average.items()}


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_the_same_at_every_stage_and_bucket_size_and_near_those_of_torchs(precision):
    run = functools.partial(train, precision=precision)
    alone_first = run(alone(), stage=0, bucket_mb=25.0)  # compiles, which threads beside each other cannot
    plain = run(alone(), stage=0, bucket_mb=25.0, compiled=False)
    for name, value in alone_first.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
    ways = [(0, 25.0), (1, 0.0003), (2, 0.0003), (3, 25.0)]
    results = [run_threads(functools.partial(run, stage=stage, bucket_mb=mb), 2)[0] for stage, mb in ways]
    for name, value in results[0][0].items():
        assert all(torch.equal(of_ranks[0][name], value) for of_ranks in results), name


def built(**settings: Any) -> zerotrain.ZeroEngine:
    zero = zerotrain.ZeroConfig(compiled_update=True)
    return zerotrain.build_engine(nn.Linear(4, 4), **{"optimizer": ADAMW, "zero": zero, **settings})


class OtherAdamW(torch.optim.AdamW):
    """Of somebody else: it may do anything in its step."""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, "the optimizer is SGD; use AdamW"),
        ({"optimizer": functools.partial(OtherAdamW, lr=0.1)}, "the optimizer is OtherAdamW; use AdamW"),
        ({"optimizer": functools.partial(ADAMW, amsgrad=True)}, "has no amsgrad=True; leave one of the two out"),
        ({"offload": zerotrain.OffloadConfig(optimizer="cpu", update="host")}, "runs on the host"),
    ],
    ids=["SGD", "a subclass", "amsgrad", "on the host"],
)
def test_what_it_does_not_compute_is_refused(settings, said):
    with pytest.raises(zerotrain.ConfigError, match=said):
        built(**settings)


@needs_compiler
def test_an_option_that_is_set_later_is_refused_too():
    engine = built()
    engine.param_groups[0]["maximize"] = True
    engine.backward(engine(torch.ones(2, 4)).sum())
    with pytest.raises(zerotrain.ConfigError, match="has no maximize=True"):
        engine.step()
