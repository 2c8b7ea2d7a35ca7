"""Training on GPUs that do not exist: nothing that streams and the host do is unordered; planted faults are found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.streams.faults import FAULTS
from tests.streams.stand_in import run_on_streams
from tests.streams.trainings import build, net, saved_beside, train
from tests.unit.checkpoint.slow_disk import SlowDisk
from zerotrain.comm.ranks.world import World
from zerotrain.settings import OffloadConfig
from zerotrain.testing.fake_wire import run_threads

OFF = OffloadConfig(optimizer="cpu", parameters="cpu")
MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01, fused=True)
Case = Callable[[World, Path, SlowDisk], Any]


def stage(number: int, **given: Any) -> Case:
    return lambda world, *_: train(build(world, number, **given))


def with_activations(world: World, **given: Any) -> zerotrain.ZeroEngine:
    return build(world, 3, offload=OffloadConfig(activations="cpu"), **given)


def left_over(world: World, *_: Any) -> None:
    """A backward that ends in the middle has begun to fetch for the unit before, whose graph is then let go of."""
    engine = with_activations(world, model=net(cuts=True))
    for _step in range(2):
        engine.backward(engine(torch.ones(512, 64)))
        engine.module.cut = None
        engine.step()


def changing(world: World, *_: Any) -> torch.Tensor:
    engine = build(world, 1)
    return train(engine, num_steps=4, between=lambda step: engine.set_stage((3, 0, 2, 2)[step]))


TRAININGS: dict[str, Case] = {
    "stage 0": stage(0),
    "stage 1": stage(1),
    "stage 2": stage(2),
    "stage 3": stage(3),
    "ordered": stage(2, reduction="ordered", precision="fp32"),
    "stage 3, ordered": stage(3, reduction="ordered"),
    "stage 0, fp32 sent": stage(0, reduction="fp32"),
    "offload": stage(3, offload=OFF),
    "activations": lambda world, *_: train(with_activations(world), num_rows=512),
    "activations that no backward needs": left_over,
    "recomputation": lambda world, *_: train(build(world, 3, net(recomputes=True))),
    "virtual ranks": stage(2, virtual_ranks=4),
    "Muon": stage(3, optimizer=MUON),
    "save": lambda world, *to: saved_beside(build(world, 2), *to),
    "save, offload": lambda world, *to: saved_beside(build(world, 3, offload=OFF), *to),
    "stages in mid-run": changing,
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thinned(2)
def test_all_that_is_done_to_the_same_bytes_is_ordered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    assert run_on_streams(lambda world: TRAININGS[name](world, tmp_path, disk)).faults == []


@pytest.mark.parametrize("name", ["stage 3, ordered", "ordered"])
def test_the_code_of_a_gpu_comes_to_the_bits_of_a_cpu(name: str) -> None:
    on_gpu = run_on_streams(TRAININGS[name]).results[0]
    on_cpu = run_threads(TRAININGS[name], 2)[0][0]
    assert torch.equal(on_gpu, on_cpu)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.thinned(2)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, disk = FAULTS[name], SlowDisk(monkeypatch)
    with fault.planted():
        found = run_on_streams(lambda world: TRAININGS[fault.training](world, tmp_path, disk), fault.size).faults
    assert any(fault.says in each for each in found), found
