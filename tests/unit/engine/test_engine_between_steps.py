"""What is given up in a step, and what may come between the calls of one, on ranks that are threads."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import build
from tests.unit.engine.parts import Counted, Linears, alone, assert_same, engine_on, inputs, on_ranks, seeded, train
from zerotrain.comm.world import World
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import DisagreementError, EngineStateError
from zerotrain.settings import OffloadConfig, ZeroConfig

STAGES = [0, 1, 2, 3]


@pytest.mark.case(
    "calls: Calls", "A step dropped with `engine.zero_grad()`", "same bits as without; memory back at rest"
)
@pytest.mark.case("calls: Calls", "`step` after a backward that failed", "refused")
@pytest.mark.parametrize("gives_up", ["zero_grad", "exception"])
@pytest.mark.parametrize("syncs_first", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_add_up_until_the_step_and_what_is_given_up_leaves_nothing(stage, precision, syncs_first, gives_up):
    def on_a_rank(world: World) -> list[Any]:
        engine = engine_on(world, Counted, precision=precision, zero={"stage": stage})

        def two_backwards(*gradients: float, breaks_off: bool = False) -> None:
            with nullcontext() if syncs_first else engine.no_sync():
                engine.backward(engine(*gradients))
            engine.backward(engine(*gradients, breaks_off=breaks_off))

        if gives_up == "zero_grad":
            two_backwards(64, 64)
            engine.zero_grad()
        else:
            with pytest.raises(ZeroDivisionError):
                two_backwards(64, 64, breaks_off=True)
        assert engine.held.pools.lent_nbytes == 0
        assert not any(bucket.gradient.reduction.handle.is_prepared for bucket in engine.schedule.trained)
        with pytest.raises(EngineStateError, match="step came before a backward"):
            engine.step()
        two_backwards(1, 2 + 2 * world.rank)
        engine.step()
        return [value.unique().tolist() for value in engine.full_state_dict().values()]

    assert run_threads(on_a_rank, 2, late_rank=1)[0][0] == [[-1.0], [-3.0]]


@pytest.mark.case(
    "calls: Calls",
    "Ctrl-C in a backward or a step, caught, as in a notebook",
    "one rank: the step's gradients are forgotten; several: forward, backward and step say to "
    "call `engine.zero_grad()` on all ranks",
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_a_backward_leaves_nothing_silently(stage, size):
    """As in a notebook, where the cell is run again. What was left came into the next step's gradient (2026-11-23)."""

    def on_a_rank(world: World) -> list[Any]:
        engine = engine_on(world, Counted, zero={"stage": stage, "bucket_mb": 0.0001})
        with pytest.raises(KeyboardInterrupt):
            engine.backward(engine(64, 64, breaks_off=True, by=KeyboardInterrupt))
        if size > 1:
            for refused in (engine.step, lambda: engine(1, 2), lambda: engine.backward(torch.ones(()))):
                with pytest.raises(
                    EngineStateError, match=r"KeyboardInterrupt interrupted a backward.*first call engine.zero_grad"
                ):
                    refused()
            engine.zero_grad()
        engine.backward(engine(1, 2))
        engine.step()
        return [value.unique().tolist() for value in engine.full_state_dict().values()]

    assert run_threads(on_a_rank, size)[0][0] == [[-0.5], [-1.0]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_in_no_sync_that_reaches_no_parameter_changes_neither_the_step_nor_its_norm(stage):
    """The step failed, since the squares of the norm were forgotten when any backward began (2026-11-23)."""

    def on_a_rank(world: World) -> list[float]:
        norms = []
        for goes_on in (False, True):
            engine = engine_on(world, zero={"stage": stage})
            engine.backward(engine(inputs(0, world.rank)))
            if goes_on:
                with engine.no_sync():
                    engine.backward(nn.Parameter(torch.ones(())) * 2)
            norms.append(engine.step().grad_norm)
        return norms

    for norm, expected in run_threads(on_a_rank, 2)[0]:
        assert norm == expected > 0


def test_no_sync_ends_with_its_block_also_when_that_raises():
    engine = engine_on(alone())
    with pytest.raises(ZeroDivisionError), engine.no_sync():
        raise ZeroDivisionError
    train(engine, 0)


@pytest.mark.case("calls: Calls", "A backward after the step that changed its weights", "refused")
def test_a_loss_from_before_the_last_step_is_refused_and_one_from_before_a_skipped_step_is_not():
    engine = engine_on(alone())
    old = [engine(inputs(0, 0)) for _ in range(2)]
    engine.backward(engine(inputs(0, 0)) * float("nan"))
    assert engine.step().skipped
    engine.backward(old[0])
    assert not engine.step().skipped
    with pytest.raises(EngineStateError, match="computed before the last step"):
        engine.backward(old[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_that_are_kept_alive_hold_up_no_reduction_of_later_backwards(stage):
    def on_a_rank(world: World, keeps: bool) -> None:
        engine, kept = engine_on(world, zero={"stage": stage}), []
        for _ in range(3):
            loss = engine(inputs(0, world.rank))
            kept += [loss] if keeps else []
            engine.backward(loss)
        engine.step()

    boards = [run_threads(functools.partial(on_a_rank, keeps=keeps), 2)[1] for keeps in (False, True)]
    assert boards[0].orders == boards[1].orders


class ReadWhileFull(Linears):
    """Reads the last block's weight before the blocks, which nobody notices while an earlier forward keeps it full. A
    parameter beside it is not used at all, so that no hook hears of that gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, is_early: bool = False) -> torch.Tensor:
        return super().forward(x + self.blocks[3].weight[:3, 0] if is_early else x)


def test_a_gradient_that_comes_when_its_bucket_was_closed_is_told():
    engine = engine_on(alone(), ReadWhileFull, zero={"stage": 3})
    engine(inputs(0, 0))
    loss = engine(inputs(0, 0), is_early=True)
    with pytest.raises(EngineStateError, match=r"the gradient of blocks\.3\.weight was late"):
        engine.backward(loss)


class HalfRecomputed(Linears):
    """Uses a part of each block again, in a reentrant checkpoint, which has a backward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
            x = x + checkpoint(lambda x, block=block: x @ block.weight, x, use_reentrant=True)
        return self.output(x).square().mean()


class NormRecomputed(nn.Module):
    """The second of two calls leaves its layer unused, and recomputes its norm in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_second: bool = False) -> torch.Tensor:
        return x + (checkpoint(self.norm, x, use_reentrant=True) if is_second else self.layer(self.norm(x)))


class CalledTwice(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormRecomputed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(block(x), is_second=True)
        return self.output(x).square().mean()


@pytest.mark.parametrize(
    ("make", "stage"), [*((HalfRecomputed, stage) for stage in range(3)), *((CalledTwice, stage) for stage in range(4))]
)
def test_a_gradient_that_comes_again_in_a_checkpoint_of_a_part_of_a_block_is_told(make, stage):
    engine = engine_on(alone(), make, zero={"stage": stage, "bucket_mb": 0.0001})
    with pytest.raises(EngineStateError, match=r"arrived twice .* use_reentrant=False"):
        engine.backward(engine(inputs(0, 0)))


# ---- between the steps


@pytest.mark.case("calls: Calls", "`eval`, `no_grad`, `inference_mode`", "same bits as without; nothing left gathered")
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_an_evaluation_in_mid_step_counts_outside_it_changes_nothing_and_leaves_nothing_gathered(world, stage):
    engine, x = engine_on(world, zero={"stage": stage}), inputs(1, world.rank)

    def evaluated() -> tuple[torch.Tensor, int, int]:
        outside = engine.ledger.outside_steps.sent_nbytes
        with torch.no_grad():
            loss = engine(x)
        return loss, engine.ledger.outside_steps.sent_nbytes - outside, engine.memory_bytes()["parameters"]

    train(engine, 0)
    at_rest = engine.memory_bytes()["parameters"]
    ordinary = engine.ledger.last_step.calls
    before = evaluated()
    loss = engine(x)
    between = evaluated()
    engine.backward(loss)
    behind = evaluated()
    engine.step()
    assert torch.equal(before[0], loss.detach())
    assert all(torch.equal(each[0], before[0]) and each[2] == at_rest for each in (before, between, behind))
    assert behind[1] == before[1] >= between[1]
    assert (before[1] > 0) == (stage == 3)
    calls = engine.ledger.last_step.calls
    assert (calls["reduce"], calls["norm"]) == (ordinary["reduce"], 1)
    assert calls["gather"] - ordinary["gather"] == (2 if stage == 3 else 0)  # what was kept for the backward


@on_ranks(2)
def test_ranks_whose_collectives_came_in_another_order_are_told_at_the_step(world):
    """Two at once, so that nobody waits in vain."""
    engine = engine_on(world)
    gathers = [engine.collectives.gather(name, torch.zeros(2), torch.zeros(1)) for name in ("a", "b")]
    for gather in gathers if world.rank == 0 else reversed(gathers):
        gather.issue()
    for gather in gathers:
        gather.finish()
    with pytest.raises(DisagreementError, match="order of the collectives"):
        train(engine, 0)


@on_ranks(2)
def test_ranks_with_another_number_of_backwards_are_told_at_the_step(world):
    engine = engine_on(world)
    for _ in range(world.rank):
        with engine.no_sync():
            engine.backward(engine(inputs(0, 0)))
    with pytest.raises(DisagreementError, match="backwards since the last step: 1 on rank 0, 2 on rank 1"):
        train(engine, 0)


# Calls of the engine within `torch.inference_mode()` and `torch.no_grad()`: what they make is trained afterwards.


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
@pytest.mark.case("calls: Calls", "`eval`, `no_grad`, `inference_mode`")
@pytest.mark.parametrize(("call", "settings", "mode"), CASES)
@pytest.mark.thinned(2)
def test_a_call_within_a_mode_without_gradients_comes_to_the_bits_of_one_outside(call, settings, mode, tmp_path):
    given = SETTINGS[settings]
    for folder in ("inside", "outside"):
        (tmp_path / folder).mkdir()
    inside = run_threads(lambda world: trained(world, given, CALLS[call], mode, tmp_path / "inside"), 2)
    outside = run_threads(lambda world: trained(world, given, CALLS[call], nullcontext, tmp_path / "outside"), 2)
    assert_same(inside[0][0], outside[0][0])


def test_what_is_built_or_given_within_inference_mode_trains_and_can_be_written_to():
    with torch.inference_mode():
        engine = zerotrain.build_engine(lambda: seeded(Linears), optimizer=ADAMW, world=alone())
    train(engine, 0)
    with torch.inference_mode():
        state = engine.full_state_dict()
    expected = engine_on(alone(), optimizer=ADAMW)
    train(expected, 0)
    assert_same(state, expected.full_state_dict())
    for value in state.values():
        value.zero_()


# What ranks tell each other with the norm: in the same step on all, without a collective of its own.


LARGEST = 2**31


@pytest.mark.case("stopping", "SIGTERM, SIGINT or SIGUSR1 to the launcher, to one rank, to all processes")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_has_in_a_step_all_are_told_in_that_step_and_only_then(stage, size):
    teller = size - 1

    def four_steps(world: zerotrain.World) -> list[tuple[bool, tuple[int, ...]]]:
        engine = build(world, stage, "fp32", seeded(lambda: torch.nn.Linear(8, 4)))
        told = []
        for signal, factor in ((0, 1.0), (LARGEST, 1.0), (15, 3e38), (0, 1.0)):
            if world.rank == teller:
                engine.signal = signal
            engine.backward(engine(torch.ones(4, 8)).sum() * factor)
            result = engine.step()
            told.append((result.skipped, result.signals))
        return told

    def by_rank(signal: int) -> tuple[int, ...]:
        return tuple(signal if rank == teller else 0 for rank in range(size))

    results, _ = run_threads(four_steps, size, late_rank=teller)
    expected = [(False, by_rank(0)), (False, by_rank(LARGEST)), (True, by_rank(15)), (False, by_rank(0))]
    assert results == [expected] * size
