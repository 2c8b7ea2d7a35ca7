"""Promise 1 under the worst timing: one rank late at every gather, reduction or step changes no bit."""

import time
from typing import Any

import pytest
from cases import Case, batch, build, micro_batches, place, reference_weights, sha256

from zerotrain.comm.collectives import Collectives
from zerotrain.config.schema import ZeroConfig
from zerotrain.testing import run_ranks

DELAY_S = 0.1
CASE = Case(ZeroConfig(bucket_mb=0.45), num_steps=2)
"""Three buckets: the head, two blocks, one block."""


def train_late(stages: list[int], late_rank: int, late_at: str) -> list[str]:
    """Train at each stage with `late_rank` asleep before each call of one kind."""
    rank, size = place()
    hashes = []
    for stage in stages:
        engine = build(CASE.with_zero(stage=stage))
        owner: Any = engine.optimizer if late_at == "step" else engine.collectives
        on_time = getattr(owner, late_at)

        def late(*args: Any, on_time: Any = on_time, **named: Any) -> Any:
            if rank == late_rank:
                time.sleep(DELAY_S)
            return on_time(*args, **named)

        setattr(owner, late_at, late)
        for step in range(CASE.num_steps):
            engine.train_step(micro_batches(batch(step, size, 1), rank))
        hashes.append(engine.weights_sha256())
    return hashes


@pytest.mark.parametrize("late_at", ["gather", "reduce", "step"])
def test_a_rank_that_is_late_changes_no_bit(late_at: str) -> None:
    assert late_at == "step" or hasattr(Collectives, late_at)
    expected = sha256(reference_weights(CASE, 2))
    for late_rank in (0, 1):
        for hashes in run_ranks(train_late, 2, [0, 1, 2, 3], late_rank, late_at):
            assert hashes == [expected] * 4
