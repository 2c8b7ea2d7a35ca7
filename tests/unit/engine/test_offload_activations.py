"""What units save for their backwards lies off the device, and nothing else changes. With threads as ranks.

Here everything is saved, however small.
"""

import copy
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import assert_same
from tests.unit.engine.parts import Losses, Plain, alone, engine_on, inputs, train
from zerotrain import OffloadConfig
from zerotrain.errors import OffloadError
from zerotrain.offload import saved, tier as rates

TIERS = ("cpu", "disk")
PAGE = 4096


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MIN_NBYTES", 1)


class Squared(torch.autograd.Function):
    """Saves an input without contiguous memory, integers, and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        order, result = x.argsort(), x * x
        ctx.save_for_backward(x, order, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, order, result = ctx.saved_tensors
        return grads[0] * (2 * x + 0 * result + 0 * order)


class Block(nn.Module):
    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.width)
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.out = nn.Linear(self.width, self.width)
        self.register_buffer("scale", torch.full((self.width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)  # three views of one memory
        x = x + self.out(Squared.apply(k.mT).mT * q + v * self.scale.to(v.dtype))
        x = torch.where(x > 0, x, 0.1 * x)
        return nn.functional.relu(self.norm(x), inplace=True)


class Net(nn.Module):
    num_blocks = 3

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(3, Block.width)
        self.blocks = nn.ModuleList(Block() for _ in range(self.num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Deeper(Net):
    num_blocks = 9


def to(where: str, path: Path) -> OffloadConfig:
    return OffloadConfig(activations=where, path=str(path))


def in_plain_pytorch(size: int, num_steps: int, make: Callable[[], nn.Module] = Net) -> dict[str, torch.Tensor]:
    """Two micro-batches a step."""

    def losses(model: nn.Module, step: int, rank: int) -> Losses:
        for part in range(2):
            yield model(inputs(2 * step + part, rank)), 0.5

    return Plain(size, make, losses=losses).train(*range(num_steps))


def accumulate(engine: zerotrain.ZeroEngine, num_steps: int) -> zerotrain.ZeroEngine:
    for step in range(num_steps):
        with engine.no_sync():
            engine.backward(engine(inputs(2 * step, engine.world.rank)), weight=0.5)
        engine.backward(engine(inputs(2 * step + 1, engine.world.rank)), weight=0.5)
        engine.step()
    return engine


def saved_of(engine: zerotrain.ZeroEngine) -> saved.SavedTensors:
    found = engine.held.homes.saved
    assert found is not None
    return found


def moved_by(engine: zerotrain.ZeroEngine, does: Callable[[], Any]) -> tuple[int, int]:
    """Pages stored and fetched."""
    tier = saved_of(engine).windows.tier
    before = tier.stored_nbytes, tier.fetched_nbytes
    does()
    return (tier.stored_nbytes - before[0]) // PAGE, (tier.fetched_nbytes - before[1]) // PAGE


@pytest.mark.case(
    "offload: Activations off the device",
    "Wherever they lie: stages 0 to 3, fp32 and bf16, all that is saved or block inputs, micro-batches",
    "same bits as plain PyTorch; nothing of it is left after a step",
)
@pytest.mark.parametrize(
    ("precision", "where", "checkpointing"),
    [("fp32", "cpu", False), ("fp32", "disk", True), ("bf16", "cpu", True), ("bf16", "disk", False)],
)
def test_wherever_it_lies_the_weights_keep_their_bits(precision, where, checkpointing, tmp_path):
    def on_a_rank(world: zerotrain.World, stage: int, offload: OffloadConfig | None) -> dict[str, torch.Tensor]:
        how: Any = {"precision": precision, "activation_checkpointing": checkpointing, "offload": offload}
        engine = accumulate(engine_on(world, Net, zero={"stage": stage}, **how), 3)
        assert engine.memory_bytes()["offloaded"] == 0
        return engine.full_state_dict()

    wanted = in_plain_pytorch(2, 3)
    if precision == "bf16":
        wanted = run_threads(lambda world: on_a_rank(world, 2, None), 2)[0][0]
    for stage in range(4):
        found, _ = run_threads(functools.partial(on_a_rank, stage=stage, offload=to(where, tmp_path)), 2)
        assert_same(found[0], wanted)


@pytest.mark.case(
    "offload: Activations off the device", "A graph that is dropped; an exception in forward or backward; `no_grad`"
)
@pytest.mark.case(
    "offload: Activations off the device",
    "Views of one memory, without contiguous memory, masks, integers, an autograd function of your own",
    "stored once for each memory, bits as above; weights and buffers never",
)
@pytest.mark.parametrize("stage", range(4))
def test_each_memory_is_stored_once_and_weights_never(stage, tmp_path):
    """A linear block saves its input and, at each stage, its weight, which the engine moves itself."""

    def on_a_rank(world: zerotrain.World) -> None:
        engine = engine_on(world, zero={"stage": stage}, offload=to("disk", tmp_path))
        for number in range(3):
            # What the last unit has saved is on the device when its backward comes.
            assert moved_by(engine, lambda number=number: train(engine, number)) == (4, 3)
        with torch.no_grad():
            assert moved_by(engine, lambda: engine(inputs(0, 0))) == (0, 0)

    run_threads(on_a_rank, 2)
    several = engine_on(alone(), Net, offload=to("cpu", tmp_path), activation_checkpointing=True)
    assert moved_by(several, lambda: train(several, 0)) == (3, 2)


@pytest.mark.case(
    "offload: Activations off the device",
    "Depth",
    "the device holds the saved tensors of one unit, in a backward of two; resident memory with "
    "all of the engine's state on a disk too",
)
@pytest.mark.parametrize("where", TIERS)
def test_the_device_holds_what_one_unit_has_saved_and_in_a_backward_two(where, tmp_path):
    most: dict[tuple[int, str], int] = {}

    def look(engine: zerotrain.ZeroEngine, *_: Any) -> None:
        found = saved_of(engine)
        held = sum(each.memory is not None for each in found._stored.values())
        held += sum(memory is not None for *_, memory in found.ended)
        key = len(engine.module.blocks), engine.schedule.phase.value
        most[key] = max(most.get(key, 0), held)

    def look_later(engine: zerotrain.ZeroEngine, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(functools.partial(look, engine))

    for make in (Net, Deeper):
        engine = engine_on(alone(), make, offload=to(where, tmp_path))
        for block in engine.module.blocks:
            block.register_forward_hook(functools.partial(look, engine))
            block.norm.register_forward_hook(functools.partial(look_later, engine))
        train(engine, 0, 1)
    assert most[9, "forward"] == most[3, "forward"]
    assert most[9, "backward"] == most[3, "backward"] <= 2 * most[3, "forward"]


@pytest.mark.case(
    "offload: Activations off the device",
    "A graph that is dropped; an exception in forward or backward; `no_grad`",
    "its places are given back; without gradients nothing is stored",
)
@pytest.mark.parametrize("where", TIERS)
def test_places_are_given_back_however_a_graph_ends(where, tmp_path):
    engine = engine_on(alone(), Net, zero={"stage": 3}, offload=to(where, tmp_path))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    looks = engine(inputs(0, 0))  # without a backward
    assert engine.memory_bytes()["offloaded"] > 0
    del looks
    assert engine.memory_bytes()["offloaded"] == 0

    hook = engine.module.blocks[2].out.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine(inputs(0, 0))
    hook.remove()
    assert engine.memory_bytes()["offloaded"] == 0

    hook = engine.module.blocks[1].out.register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(inputs(0, 0)))
    hook.remove()
    assert engine.memory_bytes()["offloaded"] == 0

    accumulate(engine, 2)
    assert_same(engine.full_state_dict(), in_plain_pytorch(1, 2))


@pytest.mark.case("offload: Activations off the device", "`retain_graph=True`, `create_graph=True`", "same bits")
@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_may_be_retained_or_differentiated_twice(stage, where, tmp_path):
    def hashed(offload: OffloadConfig | None) -> str:
        engine = engine_on(alone(), Net, zero={"stage": stage}, offload=offload)
        loss = engine(inputs(0, 0))
        with engine.no_sync():
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        with engine.forward_scope():
            x = inputs(1, 0).requires_grad_()
            loss = engine.module(x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        engine.backward(loss + slope.square().sum())
        engine.step()
        return engine.weights_sha256()

    assert hashed(to(where, tmp_path)) == hashed(None)


@pytest.mark.case(
    "offload: Activations off the device",
    "A checkpoint around several units, reentrant or not",
    "same bits; the non-reentrant one still drops its tensors",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_units_stays_what_it_is(reentrant, tmp_path):
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def both(x: torch.Tensor) -> torch.Tensor:
                return self.blocks[1](self.blocks[0](x).tanh())

            x = checkpoint(both, self.input(x), use_reentrant=reentrant)
            return self.blocks[2](x).float().square().mean()

    for stage in (2, 3):
        engine = engine_on(alone(), Checkpointed, zero={"stage": stage}, offload=to("disk", tmp_path))
        accumulate(engine, 2)
        assert_same(engine.full_state_dict(), in_plain_pytorch(1, 2, Checkpointed))


class Writing(nn.Module):
    """Its blocks write into what was saved."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).exp()
            z = y * 2
            y.add_(1)
            return z

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)).mean()


@pytest.mark.case(
    "offload: Activations off the device",
    "A write into a saved tensor",
    "PyTorch's own error; a memory that is saved, written and saved again is stored twice",
)
@pytest.mark.parametrize("min_nbytes", [1, 2**20], ids=["offloaded", "left where it is"])
def test_what_is_written_into_a_saved_tensor_is_found_as_in_plain_pytorch(min_nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "MIN_NBYTES", min_nbytes)
    told = r"modified by an inplace operation: \[.*FloatTensor \[4, 3\].* is at version 1; expected version 0 instead"
    with pytest.raises(RuntimeError, match=told):
        Writing()(inputs(0, 0)).backward()
    engine = engine_on(alone(), Writing, offload=to("cpu", tmp_path))
    with pytest.raises(RuntimeError, match=told):
        train(engine, 0)
    assert engine.memory_bytes()["offloaded"] == 0


class Rewriting(Writing):
    """Its blocks save a memory, write into it and save it again. The first is not differentiated, but still there."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.kept = y.square()
            return y.add_(1).square()


@pytest.mark.case("offload: Activations off the device", "A write into a saved tensor")
@pytest.mark.parametrize("where", TIERS)
def test_a_memory_that_was_written_to_is_saved_anew(where, tmp_path):
    engine = engine_on(alone(), Rewriting, offload=to(where, tmp_path))
    accumulate(engine, 2)
    assert_same(engine.full_state_dict(), in_plain_pytorch(1, 2, Rewriting))


@pytest.mark.case(
    "offload: Activations off the device",
    "The engine is deleted; the model is copied",
    "the units have their forwards back; a copy keeps its saved tensors",
)
def test_the_model_is_its_own_again_when_the_engine_is_gone_and_its_copies_always_are(tmp_path):
    engine = engine_on(alone(), Net, offload=to("cpu", tmp_path))
    train(engine, 0)
    model, copied = engine.module, copy.deepcopy(engine.module)
    assert moved_by(engine, lambda: copied(inputs(0, 0)).backward()) == (0, 0)
    del engine
    assert not any("forward" in block.__dict__ for block in model.blocks)


@pytest.mark.case(
    "offload: Activations off the device",
    "`set_stage`, `freeze` in mid-run; the optimizer and parameters on the same disk",
    "same bits",
)
def test_what_changes_in_mid_run_changes_no_bits(tmp_path):
    """The weights lie in other memory afterwards, which is to stay where it is as the first was."""

    def on_a_rank(world: zerotrain.World, offload: OffloadConfig | None) -> str:
        engine = engine_on(world, zero={"stage": 1}, offload=offload)
        for stage in (3, 0, 2):
            engine.set_stage(stage)
            engine.freeze("blocks.1.*")
            train(engine, stage)
            engine.unfreeze("blocks.1.*")
            if offload is not None:
                assert moved_by(engine, lambda stage=stage: train(engine, stage)) == (4, 3)
            else:
                train(engine, stage)
        return engine.weights_sha256()

    everything = OffloadConfig(optimizer="disk", parameters="disk", activations="disk", path=str(tmp_path))
    wanted, _ = run_threads(lambda world: on_a_rank(world, None), 2)
    moved, _ = run_threads(lambda world: on_a_rank(world, to("disk", tmp_path)), 2)
    assert moved == wanted
    engine = engine_on(alone(), Net, zero={"stage": 3}, offload=everything)
    accumulate(engine, 2)
    assert_same(engine.full_state_dict(), in_plain_pytorch(1, 2))


@pytest.mark.case(
    "offload: Activations off the device",
    "A disk that becomes full or fails in a step",
    "one sentence that names `offload.path`",
)
@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("posix_fallocate", errno.ENOSPC, "has no room for what rank 0 offloads .* name a folder on a larger disk"),
        ("pwritev", errno.EIO, r"cannot be written at bytes \d+ to \d+ \(Input/output error\)"),
        ("preadv", errno.EIO, r"cannot be read at bytes \d+ to \d+ \(Input/output error\)"),
    ],
)
def test_a_disk_that_is_full_or_fails_in_a_step_is_named(call, code, told, tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "SAMPLE_NBYTES", PAGE)  # the room of the sample is used again
    engine = engine_on(alone(), Deeper, offload=to("disk", tmp_path))

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OffloadError, match=rf"^offload\.path: .*{told}"):
        train(engine, 0)
