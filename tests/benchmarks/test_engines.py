"""Every engine of the comparison does the same work: it trains the same model on the same data to the same loss."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.engines import ENGINES
from benchmarks.rank import Prepared, RankResult
from benchmarks.standing import LOSS_TOLERANCE
from benchmarks.workload import Workload
from tests.ranks import run_ranks

SHARING = [name for name, spec in ENGINES.items() if spec.stage is not None]
WORKLOADS = [
    Workload(size="tiny", precision=precision, num_micro_batches=2, num_warmup_steps=1, num_steps=4)
    for precision in ("fp32", "bf16")
]


def results(engine: str) -> list[RankResult]:
    """On each rank: the engine in each workload whose precision it has."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    fitting = [workload for workload in WORKLOADS if workload.precision in ENGINES[engine].precisions]
    return [Prepared(engine, workload, torch.device("cpu")).measure() for workload in fitting]


def mean_losses(engine: str) -> list[float]:
    return [sum(rank.loss for rank in ranks) / 2 for ranks in zip(*run_ranks(results, 2, engine), strict=True)]


@pytest.fixture(scope="module")
def ours(once: Any) -> list[float]:
    return once("losses of ours", lambda: mean_losses("zero0"))


@pytest.mark.parametrize("engine", SHARING)
def test_an_engine_trains_to_the_loss_of_ours(engine: str, ours: list[float]) -> None:
    package = ENGINES[engine].package
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    losses = mean_losses(engine)
    tolerances = [LOSS_TOLERANCE[workload.precision] for workload in WORKLOADS]
    for loss, expected, tolerance in zip(reversed(losses), reversed(ours), reversed(tolerances), strict=False):
        assert loss == pytest.approx(expected, rel=tolerance)
    assert losses


def test_ranks_that_share_nothing_end_elsewhere(ours: list[float]) -> None:
    """Or equal losses would prove nothing."""
    assert abs(mean_losses("alone")[0] / ours[0] - 1) > LOSS_TOLERANCE["fp32"]


def traffic_and_memory() -> RankResult:
    return Prepared("zero2", WORKLOADS[0], torch.device("cpu")).measure()


def test_a_rank_tells_its_traffic_and_its_memory() -> None:
    for rank in run_ranks(traffic_and_memory, 2):
        assert rank.counted_nbytes == pytest.approx(rank.theory_nbytes, rel=0.1)
        assert 0 < rank.start_nbytes < rank.peak_nbytes
        assert len(rank.step_ms) == WORKLOADS[0].num_steps
