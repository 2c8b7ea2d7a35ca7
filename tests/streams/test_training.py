"""Training on GPUs that do not exist: nothing that streams and the host do is unordered; planted faults are found."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.streams.faults import FAULTS
from tests.streams.stand_in import run_on_streams
from tests.streams.trainings import ADAMW, build, net, rows, saved_beside, train
from tests.unit.checkpoint.slow_disk import SlowDisk
from zerotrain.comm.world import World
from zerotrain.settings import OffloadConfig

OFF = OffloadConfig(optimizer="cpu", parameters="cpu")
BY_HOST: dict[str, Any] = {
    "offload": OffloadConfig(optimizer="cpu", update="host", keep=0.3),
    "optimizer": functools.partial(torch.optim.AdamW, lr=0.01, foreach=False),
}
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


def looked_at_between_steps(world: World, *_: Any, **given: Any) -> None:
    """By the host, where what lies there was fetched by a forward, or is still being stored by an update."""
    engine = build(world, 3, bucket_mb=0.01, **({"offload": OFF} | given))
    engine.keep_average(decay=0.9)

    def between(step: int) -> None:
        with torch.no_grad():
            engine(rows(step, 0, world.rank))
        with engine.averaged():
            engine.weights_sha256()

    train(engine, between=between)


def changing(world: World, *_: Any, **given: Any) -> torch.Tensor:
    engine = build(world, 1, **given)
    return train(engine, num_steps=4, between=lambda step: engine.set_stage((3, 0, 2, 2)[step]))


TRAININGS: dict[str, Case] = {
    "stage 0": stage(0),
    "stage 1": stage(1),
    "stage 2": stage(2),
    "stage 3": stage(3),
    "ordered": stage(2, reduction="ordered", precision="fp32"),
    "stage 3, ordered": stage(3, reduction="ordered"),
    "stage 0, fp32 sent": stage(0, reduction="fp32"),
    "offload": stage(3, offload=OFF, bucket_mb=0.01),
    "offload of parameters alone": stage(3, offload=OffloadConfig(parameters="cpu"), bucket_mb=0.01),
    "offload, looked at between steps": looked_at_between_steps,
    "update on the host": stage(3, bucket_mb=0.01, reduction="ordered", **BY_HOST),
    "update on the host, where the parameters are too": stage(
        3, bucket_mb=0.01, **BY_HOST | {"offload": OffloadConfig("cpu", "cpu", update="host")}
    ),
    "update on the host, save": lambda world, *to: saved_beside(build(world, 3, **BY_HOST), *to),
    "update on the host, stages in mid-run": functools.partial(changing, **BY_HOST),
    "update on the host, looked at between steps": functools.partial(looked_at_between_steps, **BY_HOST),
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
def test_all_that_is_done_to_the_same_bytes_is_ordered(name, tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    assert run_on_streams(lambda world: TRAININGS[name](world, tmp_path, disk)).faults == []


@pytest.mark.parametrize("name", ["stage 3, ordered", "ordered", "update on the host"])
def test_the_code_of_a_gpu_comes_to_the_bits_of_a_cpu(name):
    on_gpu = run_on_streams(TRAININGS[name]).results[0]
    on_cpu = run_threads(TRAININGS[name], 2)[0][0]
    assert torch.equal(on_gpu, on_cpu)


class OwnAdamW(torch.optim.AdamW):
    """Says of itself that a GPU can turn it off, which it does not heed."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "somebody's own": functools.partial(OwnAdamW, lr=0.1, fused=True),
    "AdamW": ADAMW,
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
}
IS_FINITE = (False, True, False, True, True)
"""Whether the gradient of a step is: before the optimizer has any state, too."""


SKIPPING = [
    *((name, 2, "fp32") for name in OPTIMIZERS),
    *(("AdamW", number, precision) for number in range(4) for precision in ("fp32", "bf16", "fp16")),
]


@pytest.mark.parametrize(("name", "number", "precision"), SKIPPING)
@pytest.mark.thinned(2)
def test_a_gpu_skips_as_a_cpu_does(name, number, precision):
    """It is told the update before anybody knows. Also where the norm, taken in fp32, is infinite and the gradient is
    finite; with clipping and a loss scale."""
    given: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "precision": precision}

    def on_a_rank(world: World) -> tuple[list[Any], str]:
        engine = build(world, number, reduction="native", max_grad_norm=1.0, **given)
        results = []
        for step, is_finite in enumerate(IS_FINITE):
            size = 1.0 if is_finite else torch.inf
            if step == 3 and precision != "fp16":
                size = 1e25
            engine.backward(engine(rows(step, 0, world.rank)) * size)
            results.append(engine.step())
        return results, engine.weights_sha256()

    on_gpu = run_on_streams(on_a_rank, 1).results[0]
    assert [result.skipped for result in on_gpu[0]] == [not is_finite for is_finite in IS_FINITE]
    on_cpu = on_a_rank(World(0, 1, 0, torch.device("cpu")))
    assert on_gpu[1] == on_cpu[1]
    assert [result.loss_scale for result in on_gpu[0]] == [result.loss_scale for result in on_cpu[0]]
    of_two = run_on_streams(on_a_rank)
    assert of_two.faults == []
    assert of_two.results[0][1] == of_two.results[1][1]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.thinned(2)
def test_a_planted_fault_is_found(name, tmp_path, monkeypatch):
    fault, disk = FAULTS[name], SlowDisk(monkeypatch)
    with fault.planted():
        found = run_on_streams(lambda world: TRAININGS[fault.training](world, tmp_path, disk), fault.size).faults
    assert any(fault.says in each for each in found), found
