"""Schedulers of torch and transformers on an engine with groups: rates and bits of plain PyTorch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import zerotrain

ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2, fused=False)


def by_transformers(optimizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "a function for each group": lambda optimizer: schedulers.LambdaLR(
        optimizer, [lambda step, each=each: 0.9 ** (step * each) for each, _ in enumerate(optimizer.param_groups)]
    ),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(
        optimizer, [0.1 * (1 + each) for each, _ in enumerate(optimizer.param_groups)], total_steps=8
    ),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, 0.1, 1.0, 2), schedulers.CosineAnnealingLR(optimizer, 6)], [2]
    ),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "transformers": by_transformers,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def scheduled(scheduler: Any) -> list[float]:
    scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return list(scheduler.get_last_lr())


@pytest.mark.case(
    "optimizers",
    "schedulers of torch and transformers over several groups, resumed in the middle with their state",
    "the rates and the bits of plain PyTorch",
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_schedules_each_group_and_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    make, plain = SCHEDULERS[name], model()

    def built() -> tuple[zerotrain.ZeroEngine, Any]:
        engine = zerotrain.build_engine(
            model(), optimizer=ADAMW, decay_all=False, param_groups=[{"params": "0.*", "lr": 0.3}]
        )
        return engine, make(engine.optimizer)

    optimizer = ADAMW(
        [
            {"params": [plain[2].weight]},
            {"params": [plain[1].weight, plain[1].bias, plain[2].bias], "weight_decay": 0.0},
            {"params": [plain[0].weight], "lr": 0.3},
            {"params": [plain[0].bias], "lr": 0.3, "weight_decay": 0.0},
        ]
    )
    theirs, (engine, ours) = make(optimizer), built()
    assert [group["name"] for group in engine.param_groups] == ["matrices", "others", "group 0", "group 0 others"]
    for step in range(6):
        if step == 3:
            engine.save(tmp_path / "middle")
            kept = ours.state_dict()
            engine, ours = built()
            engine.load(tmp_path / "middle")
            ours.load_state_dict(kept)
        engine.backward(engine(torch.full((5, 3), 1.0 + step)).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(torch.full((5, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()
        assert scheduled(ours) == scheduled(theirs)
    for key, value in engine.full_state_dict().items():
        assert torch.equal(value, plain.state_dict()[key]), key
