"""Calls of the engine within `torch.inference_mode()` and `torch.no_grad()`: what they make is trained afterwards."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.engine.parts import Linears, assert_same, engine_on, inputs, seeded, train
from zerotrain.comm.world import World
from zerotrain.engine.engine import ZeroEngine
from zerotrain.settings import OffloadConfig, ZeroConfig
from zerotrain.testing.fake_wire import run_threads

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.1)
Call = Callable[[ZeroEngine, Path], object]
CALLS: dict[str, Call] = {
    "set_stage": lambda engine, _: engine.set_stage((engine.options.zero.stage + 2) % 4),
    "freeze": lambda engine, _: engine.freeze("output.*"),
    "unfreeze": lambda engine, _: (engine.freeze("output.*"), engine.unfreeze("output.*")),
    "add_param_group": lambda engine, _: (
        engine.freeze("output.*"),
        engine.add_param_group({"params": "output.*", "lr": 0.2}),
    ),
    "load": lambda engine, folder: (engine.save(folder / "saved"), engine.load(folder / "saved")),
    "load_weights": lambda engine, folder: (engine.save(folder / "saved"), engine.load_weights(folder / "saved")),
    "load_state_dict": lambda engine, _: engine.load_state_dict(engine.full_state_dict()),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "a forward": lambda engine, _: engine(inputs(9, engine.world.rank)),
    "an optimizer": lambda engine, _: torch.optim.lr_scheduler.StepLR(engine.optimizer, 1),
    "nothing": lambda engine, _: None,
}
SETTINGS: list[dict[str, Any]] = [
    *({"zero": ZeroConfig(stage=stage, bucket_mb=0.0003), "precision": "fp32"} for stage in (0, 2, 3)),
    {"zero": ZeroConfig(stage=1, bucket_mb=0.0003), "precision": "bf16"},
    {
        "zero": ZeroConfig(stage=3, bucket_mb=0.0003),
        "precision": "bf16",
        "offload": OffloadConfig(optimizer="cpu", parameters="cpu"),
    },
]


def trained(world: World, settings: dict[str, Any], call: Call, mode: Any, folder: Path) -> dict[str, torch.Tensor]:
    """After three steps, with a call between them. The build and the steps themselves are made in `mode` too."""
    model = seeded(Linears)
    with mode():
        engine = zerotrain.build_engine(model, optimizer=ADAMW, world=world, **settings)
    for step in range(3):
        engine.backward(engine(inputs(step, world.rank)))
        with mode():
            engine.step()
            if step == 1:
                call(engine, folder)
    engine.set_stage(0)
    train(engine, 3)
    return engine.full_state_dict()


CASES = [
    (call, settings, torch.inference_mode)
    for place, call in enumerate(CALLS)
    for settings in (place % 4, (place + 2) % 4, 4)
]
"""Calls have the settings but the last in turns; tests/bits has the others."""
CASES += [(call, place % len(SETTINGS), torch.no_grad) for place, call in enumerate(CALLS)]


@pytest.mark.case(
    "calls: Calls",
    "`build_engine`, `set_stage`, `freeze`, `load` and the other calls between steps, `step` too, "
    "within `inference_mode` or `no_grad`",
)
@pytest.mark.parametrize(("call", "settings", "mode"), CASES)
@pytest.mark.thinned(2)
def test_a_call_within_a_mode_without_gradients_comes_to_the_bits_of_one_outside(
    call: str, settings: int, mode: Any, tmp_path: Path
) -> None:
    given = SETTINGS[settings]
    for folder in ("inside", "outside"):
        (tmp_path / folder).mkdir()
    inside = run_threads(lambda world: trained(world, given, CALLS[call], mode, tmp_path / "inside"), 2)
    outside = run_threads(lambda world: trained(world, given, CALLS[call], nullcontext, tmp_path / "outside"), 2)
    assert_same(inside[0][0], outside[0][0])


def test_a_model_that_build_engine_builds_within_inference_mode_trains() -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            engine = zerotrain.build_engine(lambda: seeded(Linears), optimizer=ADAMW, world=world)
        train(engine, 0)
        return engine.full_state_dict()

    expected = engine_on(zerotrain.World(rank=0, size=1, local_rank=0, device=torch.device("cpu")), optimizer=ADAMW)
    train(expected, 0)
    assert_same(run_threads(on_a_rank, 1)[0][0], expected.full_state_dict())


def test_what_full_state_dict_gives_within_inference_mode_can_be_written_to() -> None:
    def on_a_rank(world: World) -> None:
        engine = engine_on(world)
        with torch.inference_mode():
            state = engine.full_state_dict()
        for value in state.values():
            value.zero_()

    run_threads(on_a_rank, 2)
