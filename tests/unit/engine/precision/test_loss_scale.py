import functools

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.engine.model.precision import MAX_SCALE, LossScaler


def scales(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    """The scale of each step."""
    seen = []
    for overflowed in overflows:
        seen.append(scaler.scale)
        scaler.update(overflowed=overflowed)
    return seen


@pytest.mark.parametrize("growth_interval", [1, 2, 3])
def test_the_scales_are_those_of_torchs_own_scaler(growth_interval: int) -> None:
    overflows = [bool(bit) for bit in torch.randint(0, 4, (24,), generator=torch.Generator().manual_seed(0)) == 0]
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth_interval)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for overflowed in overflows:
        theirs.scale(weight.sum())  # makes its scale
        weight.grad = torch.full((1,), torch.inf if overflowed else 0.0)
        expected.append(theirs.get_scale())
        theirs.step(optimizer)
        theirs.update()
    assert 1.0 < min(expected) < max(expected) < MAX_SCALE  # theirs knows neither limit
    assert scales(LossScaler(initial_scale=2.0**12, growth_interval=growth_interval), overflows) == expected


def test_it_never_comes_under_1_nor_leaves_fp32() -> None:
    falling = LossScaler(initial_scale=4.0, growth_interval=1)
    assert scales(falling, [True] * 4) == [4.0, 2.0, 1.0, 1.0]
    assert falling.is_exhausted
    rising = LossScaler(initial_scale=MAX_SCALE / 2, growth_interval=1)
    assert scales(rising, [False] * 3) == [MAX_SCALE / 2, MAX_SCALE, MAX_SCALE]
    assert not rising.is_exhausted


def test_its_state_goes_on_in_another() -> None:
    first = LossScaler(initial_scale=2.0, growth_interval=3)
    scales(first, [False, False])
    second = LossScaler(initial_scale=64.0, growth_interval=3)
    second.load_state_dict(first.state_dict())
    assert scales(second, [False, False]) == [2.0, 4.0]


def train(initial_scale: float, max_grad_norm: float | None) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    engine = zerotrain.build_engine(
        model,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        precision=zerotrain.PrecisionConfig("fp16", initial_scale=initial_scale),
        max_grad_norm=max_grad_norm,
    )
    norms = []
    for _ in range(3):
        # Gradients around 1: with none of these scales does one reach what fp16 cannot hold.
        engine.backward((engine(torch.ones(4, 16)).float() - 1).sum())
        norms.append(engine.step().grad_norm)
    return engine.weights_sha256(), norms


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_scale_that_causes_no_overflow_changes_no_bit_of_weights_and_norm(max_grad_norm: float | None) -> None:
    assert train(1.0, max_grad_norm) == train(2.0, max_grad_norm) == train(2.0**10, max_grad_norm)
