"""What an engine keeps off the device, and that the weights keep their bits. With threads as ranks.

On a CPU "off the device" is memory apart from that which is computed with, or a file: the same code as beside a GPU,
but for the copies between the two.
"""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import (
    ADAMW,
    KINDS,
    Hard,
    Kind,
    Matrices,
    assert_same_counts,
    assert_same_state,
    build,
    counted,
    held,
    joined,
    train,
)
from tests.unit.engine.parts import on_ranks
from zerotrain import OffloadConfig
from zerotrain.errors import CheckpointError, OffloadError
from zerotrain.offload.tier import Window, Windows

TIERS = ("cpu", "disk")
NUM_STEPS = 2
"""At each stage: the first has other memory, and the second uses what the first has left there."""


def to(where: str, path: Path, **how: Any) -> OffloadConfig:
    """All of it."""
    return OffloadConfig(optimizer=where, parameters=where, path=str(path), **how)


def accumulated(engine: zerotrain.ZeroEngine, step: int) -> None:
    """A step of two micro-batches."""
    generator = torch.Generator().manual_seed(step)
    with engine.no_sync():
        engine.backward(engine(torch.randint(37, (9,), generator=generator)), weight=0.5)
    engine.backward(engine(torch.randint(37, (9,), generator=generator)), weight=0.5)
    engine.step()


def trained(world: zerotrain.World, kind: Kind, stages: Sequence[int], offload: OffloadConfig | None) -> Any:
    """After some steps at each of these stages: the weights, and what is kept of them."""
    engine = build(world, kind, stages[0], offload=offload)
    hashes = []
    for number, stage in enumerate(stages):
        engine.set_stage(stage)
        train(engine, *range(NUM_STEPS * number, NUM_STEPS * (number + 1)), of_rank=world.rank)
        if kind.model is Hard:
            accumulated(engine, number)
        hashes.append(engine.weights_sha256())
    return hashes, held(engine), counted(engine)


@pytest.mark.parametrize(
    ("kind", "size", "where"),
    [
        (kind, size, TIERS[(index // 2 + place) % 2])
        for index, kind in enumerate(KINDS)
        for place, size in enumerate((1, 2 + index % 2))
    ],
)
@pytest.mark.thinned(3)
def test_wherever_it_lies_and_whatever_the_stage_the_bits_are_the_same(kind, size, where, tmp_path):
    """With more steps and on every number of ranks in tests/bits."""
    stages = (1, 3, 2, 0, 3)
    wanted, _ = run_threads(lambda world: trained(world, KINDS[kind], stages, None), size)
    found, _ = run_threads(
        lambda world: trained(world, KINDS[kind], stages, to(where, tmp_path, keep=0.3)), size, late_rank=size - 1
    )
    for rank in range(size):
        assert found[rank][0] == wanted[rank][0]
        assert_same_counts(found[rank][2], wanted[rank][2])
    assert_same_state(joined([each[1] for each in found]), joined([each[1] for each in wanted]))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["hard parameters, AdamW", "Muon and AdamW, bf16"])
@pytest.mark.thinned(2)
def test_a_checkpoint_goes_from_any_place_to_any_other(kind, stage, tmp_path):
    """Saved beside the training, which goes on meanwhile, with a disk too slow for it."""

    def on_a_rank(world: zerotrain.World, places: Sequence[OffloadConfig | None], name: str) -> str:
        engine = build(world, KINDS[kind], stage, offload=places[0])
        train(engine, 0, 1)
        for number, place in enumerate(places[1:]):
            save = engine.begin_save(tmp_path / f"{name} {number}", staging_nbytes=0)
            train(engine, 90, 91)
            save.wait()
            engine = build(world, KINDS[kind], stage, seed=5, offload=place)
            engine.load(tmp_path / f"{name} {number}")
            train(engine, 2 * number + 2, 2 * number + 3)
        return engine.weights_sha256()

    device = OffloadConfig()
    wanted, _ = run_threads(lambda world: on_a_rank(world, [device] * 6, "device"), 2)
    cpu, disk = (to(where, tmp_path) for where in TIERS)
    found, _ = run_threads(lambda world: on_a_rank(world, [disk, cpu, disk, device, cpu, disk], "moved"), 2)
    assert found == wanted


def test_what_trains_may_change_and_old_places_are_used_again(tmp_path):
    def on_a_rank(world: zerotrain.World, offload: OffloadConfig | None) -> tuple[str, list[int]]:
        engine = build(world, Kind(), 3, offload=offload)
        sizes = []
        for step in range(0, 12, 2):
            train(engine, step)
            engine.freeze("blocks.0.*")
            train(engine, step + 1)
            engine.unfreeze("blocks.0.*")
            sizes.append(engine.memory_bytes()["offloaded"])
        return engine.weights_sha256(), sizes

    wanted, _ = run_threads(lambda world: on_a_rank(world, None), 2)
    for where in TIERS:
        found, _ = run_threads(lambda world, where=where: on_a_rank(world, to(where, tmp_path)), 2)
        assert [each[0] for each in found] == [each[0] for each in wanted]
        assert len(set(found[0][1])) == 1


def test_what_lies_off_the_device_is_not_on_it_and_is_as_much_as_the_theory_says(tmp_path):
    def on_a_rank(world: zerotrain.World, keep: float) -> list[dict[str, Any]]:
        engine = build(world, Kind(Matrices, precision="bf16"), 3, offload=to("disk", tmp_path, keep=keep))
        planned = engine.planned_nbytes()
        train(engine, 0, 1)
        return [engine.memory_bytes(), planned]

    numel = sum(each.numel() for each in Matrices().parameters())
    for (held_bytes, planned), (kept, _) in zip(
        run_threads(lambda world: on_a_rank(world, 0.0), 2)[0],
        run_threads(lambda world: on_a_rank(world, 0.5), 2)[0],
        strict=True,
    ):
        theory = held_bytes["theory"]
        assert held_bytes["parameters"] == held_bytes["optimizer"] == theory["parameters"] == theory["optimizer"] == 0
        assert theory["offloaded"] == (2 + 12) * numel // 2
        assert planned == {kind: held_bytes[kind] for kind in planned}
        # A page for each place, and 64 elements for each parameter and rank.
        assert 0 <= held_bytes["offloaded"] - theory["offloaded"] < 20 * 4096 + 12 * 64 * 16
        assert 0 < kept["theory"]["optimizer"] <= kept["optimizer"] <= 0.5 * 12 * numel / 2
        assert kept["theory"]["optimizer"] + kept["theory"]["offloaded"] == pytest.approx(theory["offloaded"], abs=1)
        assert kept["offloaded"] < held_bytes["offloaded"]


@pytest.mark.parametrize("where", TIERS)
def test_a_step_moves_each_bucket_once_there_and_once_back_through_three_windows(where, tmp_path):
    engine = build(zerotrain.World.current(torch.device("cpu")), Kind(Matrices), 2, offload=to(where, tmp_path))
    train(engine, 0)
    (tier,) = (each for each in engine.held.homes.tiers if each.placed_nbytes)
    before = tier.fetched_nbytes, tier.stored_nbytes
    train(engine, 1)
    assert (tier.fetched_nbytes - before[0], tier.stored_nbytes - before[1]) == (tier.placed_nbytes,) * 2
    (told,) = engine.offloaded(num_micro_batches=1)
    assert (told.nbytes, told.fetched_nbytes, told.stored_nbytes) == (tier.placed_nbytes,) * 3
    largest = max(bucket.update.home.nbytes for bucket in engine.schedule.trained)
    assert len(engine.schedule.trained) > 3
    assert engine.held.homes.windows_nbytes <= 3 * largest


@pytest.mark.parametrize("where", TIERS)
@on_ranks(2)
def test_shards_are_fetched_for_each_gather_and_stored_behind_the_update(world, where, tmp_path):
    engine = build(
        world, Kind(Matrices, precision="bf16"), 3, offload=OffloadConfig(parameters=where, path=str(tmp_path))
    )
    train(engine, 0)
    (tier,) = (each for each in engine.held.homes.tiers if each.placed_nbytes)
    before = tier.fetched_nbytes, tier.stored_nbytes
    train(engine, 1)
    (told,) = engine.offloaded(num_micro_batches=1)
    assert told.stored_nbytes == tier.stored_nbytes - before[1] == tier.placed_nbytes
    # The root and the last unit stay from the forward to the backward.
    assert tier.placed_nbytes < tier.fetched_nbytes - before[0] <= told.fetched_nbytes == 2 * tier.placed_nbytes


def test_on_the_host_the_optimizer_computes_where_its_state_lies():
    def on_a_rank(world: zerotrain.World, offload: OffloadConfig | None) -> tuple[str, int]:
        engine = build(world, Kind(precision="bf16"), 2, offload=offload)
        train(engine, 0, 1, 2)
        return engine.weights_sha256(), engine.held.homes.windows_nbytes

    host = OffloadConfig(optimizer="cpu", update="host")
    found, _ = run_threads(lambda world: on_a_rank(world, host), 2)
    # Of a CPU the host's update has the same bits.
    assert [each[0] for each in found] == [each[0] for each in run_threads(lambda world: on_a_rank(world, None), 2)[0]]
    assert [each[1] for each in found] == [0, 0]


class Changing(torch.optim.SGD):
    """Keeps a tensor that is another object each time, and from the third step on one more, which nobody foresaw."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                state["num"] = state.get("num", 0) + 1
                if state["num"] > 2:
                    state["more"] = state.get("more", torch.zeros_like(parameter)) + state["sum"]
                parameter.sub_(state.get("more", state["sum"]), alpha=0.001)


@pytest.mark.parametrize("where", TIERS)
def test_an_optimizer_may_replace_its_tensors_and_make_more_of_them(where, tmp_path):
    def on_a_rank(world: zerotrain.World, offload: OffloadConfig | None) -> tuple[str, int]:
        engine = build(world, Kind(Matrices, lambda groups: Changing(groups, lr=0.01)), 2, offload=offload)
        train(engine, *range(6))
        homes = [bucket.update.home for bucket in engine.schedule.trained]
        assert engine.held.homes.placed_nbytes == sum(home.nbytes for home in homes)  # no place that is used no more
        return engine.weights_sha256(), engine.memory_bytes()["optimizer"]

    wanted, _ = run_threads(lambda world: on_a_rank(world, None), 2)
    found, _ = run_threads(lambda world: on_a_rank(world, to(where, tmp_path)), 2)
    assert [each[0] for each in found] == [each[0] for each in wanted]
    assert [each[1] for each in found] == [0, 0]


@pytest.mark.case(
    "offload: Offload",
    "weights written by me in place, between steps",
    "kept, also where 16-bit shards lie off the device",
)
@pytest.mark.parametrize("where", TIERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_users_write_into_parameters_is_kept(precision, where, tmp_path, monkeypatch):
    """Shards of 16 bits are made anew from master weights, and not fetched for that: but what was written is in them.
    A window holds anything until then."""

    def on_a_rank(world: zerotrain.World, offload: OffloadConfig | None) -> str:
        engine = build(world, Kind(Matrices, precision=precision), 3, offload=offload)
        for step in range(3):
            train(engine, step)
            with torch.no_grad(), engine.forward_scope():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.25)
        train(engine, 3)
        return engine.weights_sha256()

    wanted, _ = run_threads(lambda world: on_a_rank(world, None), 2)
    take = Windows.take

    def take_spoilt(self: Windows, nbytes: int) -> Window:
        window = take(self, nbytes)
        window.memory.fill_(255)
        return window

    monkeypatch.setattr(Windows, "take", take_spoilt)
    assert run_threads(lambda world: on_a_rank(world, to(where, tmp_path)), 2)[0] == wanted


# ---- a disk that fails


def alone(path: Path, **how: Any) -> zerotrain.ZeroEngine:
    world = zerotrain.World.current(torch.device("cpu"))
    return build(world, Kind(Matrices, ADAMW), 2, offload=OffloadConfig(optimizer="disk", path=str(path)), **how)


@pytest.mark.case(
    "offload: Offload", "the disk fails while a save reads it", "the save fails by name, and the training goes on"
)
def test_a_disk_that_fails_a_save_is_named_and_training_goes_on(tmp_path, monkeypatch):
    engine, wanted = alone(tmp_path / "disk"), alone(tmp_path / "disk")
    for each in (engine, wanted):
        train(each, 0, 1)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"offload\.path: the file of rank 0 in .* cannot be read at bytes"):
            engine.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    for each in (engine, wanted):
        train(each, 2)
    assert engine.weights_sha256() == wanted.weights_sha256()


def test_what_is_fetched_anew_has_left_before(tmp_path, monkeypatch):
    """By the last update, for the next, where all is one bucket. A write waits for a read that must not come."""
    wanted = alone(tmp_path, bucket_mb=25)
    train(wanted, 0, 1, 2)
    found = alone(tmp_path, bucket_mb=25)
    write, read, is_read = os.pwritev, os.preadv, threading.Event()

    def write_late(*arguments: Any) -> int:
        is_read.clear()  # this step's own read is done
        is_read.wait(0.1)
        return write(*arguments)

    def read_soon(*arguments: Any) -> int:
        count = read(*arguments)
        is_read.set()
        return count

    monkeypatch.setattr(os, "pwritev", write_late)
    monkeypatch.setattr(os, "preadv", read_soon)
    train(found, 0, 1, 2)
    assert found.weights_sha256() == wanted.weights_sha256()


def test_a_folder_that_can_be_none_is_named():
    with pytest.raises(OffloadError, match=rf"offload\.path: no file can be made in {os.devnull}"):
        alone(Path(os.devnull))
