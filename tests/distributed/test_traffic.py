"""Promise 2, on the wire: bytes at the theory and a known number of collectives, at every stage."""

from typing import Any

import pytest
from cases import Case, run_over, train

from zerotrain.settings import ZeroConfig

NORM_NBYTES = (4 + 5 + 1 + 1) * 8
"""What one rank tells each other one for the gradient norm, and to compare what the ranks have done."""


def last_step(case: Case) -> dict[str, Any]:
    engine = train(case)
    sent = engine.ledger.last_step
    buckets = engine.schedule.buckets
    padding = sum(bucket.layout.padded_numel - bucket.layout.numel for bucket in buckets)
    return {
        "calls": dict(sent.calls),
        "sent": sent.sent_nbytes,
        "theory": engine.theoretical_sent_nbytes(case.num_micro_batches),
        "padding": padding * engine.precision.compute.itemsize,
        "num_buckets": len(buckets),
        "num_kept": sum(bucket.stays_full for bucket in buckets),
        "numel": engine.num_parameters,
    }


@pytest.mark.parametrize(("precision", "num_ranks"), [("fp32", 3), ("bf16", 2)])
def test_a_step_with_replicated_parameters_sends_each_byte_down_and_up_once(precision: str, num_ranks: int) -> None:
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    cases = [
        Case(
            ZeroConfig(stage=stage, bucket_mb=0.05),
            precision=precision,
            num_micro_batches=(1, 3)[(stage + num_ranks + itemsize // 4) % 2],
        )
        for stage in (0, 1, 2)
    ]
    for by_rank in run_over(cases, last_step, num_ranks):
        for step in by_rank:
            theory = 2 * step["numel"] * itemsize * (num_ranks - 1) / num_ranks
            assert step["theory"] == round(theory)
            extra = 2 * step["padding"] * (num_ranks - 1) / num_ranks + NORM_NBYTES * (num_ranks - 1)
            assert step["sent"] == pytest.approx(theory + extra, abs=1)
            assert step["padding"] < 0.02 * step["numel"] * itemsize
            assert step["calls"] == {"reduce": step["num_buckets"], "gather": step["num_buckets"], "norm": 1}
            assert step["num_buckets"] > 5


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_with_sharded_parameters_sends_at_most_three_times_their_bytes(num_ranks: int) -> None:
    cases = [Case(ZeroConfig(stage=3, bucket_mb=0.05), num_micro_batches=number) for number in (1, 3)]
    for case, by_rank in zip(cases, run_over(cases, last_step, num_ranks), strict=True):
        for step in by_rank:
            share = step["numel"] * 4 * (num_ranks - 1) / num_ranks
            assert step["theory"] == round((1 + 2 * case.num_micro_batches) * share)
            assert 2 * share < step["sent"] <= step["theory"]
            # A bucket is gathered for its forward and for its backward, but those kept from one to the other once.
            gathers = case.num_micro_batches * (2 * step["num_buckets"] - step["num_kept"])
            assert step["calls"] == {"reduce": step["num_buckets"], "gather": gathers, "norm": 1}
