"""What a run measures of a step is that of all its ranks."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.processes import run_ranks
from zerotrain.training.callbacks.measuring import Measuring, rates_of
from zerotrain.training.clock import StepClock
from zerotrain.training.metrics.metric import TrainingMetrics
from zerotrain.training.result import RunResult


class Line(torch.nn.Linear):
    """Its loss is what it gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def measured() -> dict[str, Any]:
    """Each rank waits for its rows half a second longer than the one before it, but the last does not."""
    world = zerotrain.World.current(torch.device("cpu"))
    engine = zerotrain.build_engine(Line(2, 1), optimizer=torch.optim.SGD, world=world)
    sampler = SimpleNamespace(global_batch_size=4, num_virtual_ranks=3, num_micro_batches=1)
    position = {"epoch": 0.5, "samples": 16, "tokens": None}
    feed: Any = SimpleNamespace(position=lambda: position, sampler=sampler, reads_tokens=False)
    stages: Any = None  # asked at the end alone
    clock, result = StepClock(), RunResult(world_size=world.size)
    metrics = TrainingMetrics({}, engine, feed.sampler)
    measuring = Measuring(clock, feed, stages, metrics, model_flops=None, log_every=2)
    for wait_s in (0.0, 0.5 * (world.rank % 2)):
        with clock:
            outcome = engine.train_step([(torch.full((1, 2), float(world.rank)),)])
        clock.count(0.0, wait_s, num_labels=8.0)
    run: Any = SimpleNamespace(engine=engine, world=world, result=result)
    return measuring._step_metrics(run, outcome) | {"loss": outcome.loss.item()}


def test_the_loss_is_the_mean_of_the_ranks_and_the_wait_that_of_the_longest() -> None:
    by_rank = run_ranks(measured, 3)
    mean = sum(each["loss"] for each in by_rank) / 3
    assert len({each["loss"] for each in by_rank}) == 3
    assert [each["train_loss"] for each in by_rank] == pytest.approx([mean] * 3)
    assert [each["data_wait_ms"] for each in by_rank] == pytest.approx([250.0] * 3)
    assert [(each["epoch"], each["samples"]) for each in by_rank] == [(0.5, 16)] * 3
    assert [each["tokens_per_s"] for each in by_rank] == [None] * 3  # these rows are no text
    assert [each["labels_per_s"] / each["samples_per_s"] for each in by_rank] == pytest.approx([2.0] * 3)
    assert all(each["sent_nbytes"] > 0 and each["peak_nbytes"] > 0 and each["train_s"] > 0 for each in by_rank)


def rates(*by_group: float) -> dict[str, float]:
    model = torch.nn.ModuleList(Line(2, 1) for _ in by_group)
    groups = [{"params": [*each.parameters()], "lr": rate} for each, rate in zip(model, by_group, strict=True)]
    return rates_of(zerotrain.build_engine(model, optimizer=torch.optim.SGD, param_groups=groups))


def test_a_group_with_a_rate_of_its_own_has_a_curve_of_its_own() -> None:
    assert rates(0.1) == rates(0.1, 0.1) == {"lr": 0.1}
    assert rates(0.1, 0.2, 0.1) == {"lr": 0.1, "lr/group 1": 0.2}


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.05)
        super().step(closure)


def parts_of_a_step(folder: Path, *, overlap: bool, stage: int) -> list[tuple[float, float, float]]:
    """Rank 1 sleeps for half a second once rank 0 is about to wait for it: (step, wait, update) in seconds."""
    world = zerotrain.World.current(torch.device("cpu"))
    zero = zerotrain.ZeroConfig(stage=stage, overlap=overlap)
    engine = zerotrain.build_engine(Line(2, 1), optimizer=SlowSGD, zero=zero, world=world)
    clock, found = StepClock(), []
    for number in range(2):
        with clock:
            if world.rank == 0:
                (folder / str(number)).touch()
            else:
                while not (folder / str(number)).exists():
                    time.sleep(0.001)
                time.sleep(0.5)
            engine.train_step([(torch.ones(1, 2),)])
        clock.count(0.0, traffic=engine.ledger.last_step)
        figures = clock.figures(1)
        found.append((clock.last_s, figures["comm_wait_ms"] / 1e3, figures["update_ms"] / 1e3))
    return found


@pytest.mark.parametrize(("stage", "overlap"), [(0, False), (1, True), (2, False), (3, True)])
def test_the_time_of_a_step_is_told_apart(tmp_path: Path, stage: int, overlap: bool) -> None:
    of_first, of_second = run_ranks(partial(parts_of_a_step, tmp_path, overlap=overlap, stage=stage), 2)
    for step_s, wait_s, update_s in (*of_first, *of_second):
        assert update_s >= 0.05  # its optimizer sleeps for so long
        assert wait_s + update_s <= step_s
    assert all(wait_s >= 0.1 for _, wait_s, _ in of_first)
