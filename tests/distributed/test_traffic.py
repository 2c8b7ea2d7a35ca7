"""Promise 2, on the wire: bytes at the theory and a known number of collectives, at every stage."""

from typing import Any

import pytest
import torch
from cases import SEQ_LEN, VOCAB, Case, batch, build, micro_batches, place, run_over, train
from torch import nn

import zerotrain
from zerotrain.models import GPT
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


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thinned(2, first=1)
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


def test_parameters_kept_after_the_forward_are_gathered_once_a_step() -> None:
    zero = ZeroConfig(stage=3, bucket_mb=0.05, reshard_after_forward=False)
    for by_rank in run_over([Case(zero), Case(zero, num_micro_batches=3)], last_step, 2):
        for step in by_rank:
            assert step["calls"] == {"reduce": step["num_buckets"], "gather": step["num_buckets"], "norm": 1}
            assert step["theory"] == step["numel"] * 4


def test_without_overlap_the_same_collectives_are_issued() -> None:
    overlapped = [Case(ZeroConfig(stage=stage, bucket_mb=0.05)) for stage in range(4)]
    waiting = [case.with_zero(overlap=False) for case in overlapped]
    assert run_over(waiting, last_step, 2) == run_over(overlapped, last_step, 2)


def last_step_of_many_layers(case: Case) -> tuple[dict[str, int], int, int]:
    """The collectives of a step, the bytes they sent, and those of theory."""
    rank, size = place()
    model = GPT(vocab_size=VOCAB, max_seq_len=SEQ_LEN, num_layers=30, num_heads=4, hidden_size=64)
    engine = build(case, model)
    engine.train_step(micro_batches(batch(0, size, 1), rank))
    sent = engine.ledger.last_step
    return dict(sent.calls), sent.sent_nbytes, engine.theoretical_sent_nbytes(1)


def test_units_that_share_a_bucket_gather_it_together() -> None:
    """Seen with each unit freeing the bucket behind itself: 34 gathers instead of 8, and 3.8 times the bytes."""
    [by_rank] = run_over([Case(ZeroConfig(stage=3))], last_step_of_many_layers, 2)
    for calls, sent, theory in by_rank:
        assert 4 < calls["reduce"] < 12  # once for each bucket: so several layers share one
        assert calls["gather"] <= 2 * calls["reduce"]
        assert sent <= theory


# ---- when


NUM_LINEAR = 5
LINEAR_MB = 64 * 65 * 4 / 2**20
"""Each layer is a bucket of its own."""


def gathers_issued_by_the_time_of_each_layer(prefetch: int) -> tuple[list[int], list[int]]:
    """How many gathers of a step have been issued when each layer computes: in the forward, then in the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(NUM_LINEAR)))
    zero = ZeroConfig(stage=3, bucket_mb=LINEAR_MB, prefetch=prefetch)
    engine = zerotrain.build_engine(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), zero=zero)
    record, num_gathers = engine.ledger.record, 0

    def counting(kind: str, nbytes: int) -> None:
        nonlocal num_gathers
        num_gathers += kind == "gather"
        record(kind, nbytes)

    setattr(engine.ledger, "record", counting)  # noqa: B010
    forward: list[int] = []
    backward: list[int] = []
    for layer in model:
        # Hooks of ours come behind those of the engine; the second is called at the end of a layer's backward.
        layer.register_forward_pre_hook(lambda *_: forward.append(num_gathers))
        layer.register_full_backward_hook(lambda *_: backward.append(num_gathers))
    loss = engine(torch.ones(2, 64, requires_grad=True)).square().mean()
    num_gathers = 0
    engine.backward(loss)
    return forward, backward


def test_the_gather_of_the_next_layer_is_under_way_while_a_layer_computes_forward_and_backward() -> None:
    for prefetch, by_rank in zip(
        (0, 1, 2), run_over([0, 1, 2], gathers_issued_by_the_time_of_each_layer, 2), strict=True
    ):
        # The last layer, whose backward comes first, is not freed between.
        expected = (
            [min(number + prefetch, NUM_LINEAR) for number in (1, 2, 3, 4, 5)],
            [min(number + prefetch, NUM_LINEAR - 1) for number in (0, 1, 2, 3, 4)],
        )
        assert by_rank == [expected] * 2


# ---- what belongs to a step


def given_up(engine: zerotrain.ZeroEngine, inputs: Any) -> None:
    engine.backward(engine(*inputs))
    engine.zero_grad()
    engine.backward(engine(*inputs))


def evaluated(engine: zerotrain.ZeroEngine, inputs: Any) -> None:
    engine.backward(engine(*inputs))
    with torch.no_grad():
        engine(*inputs)


def traffic_of_steps(stage: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Calls and bytes of an ordinary step, of one after a backward that was given up, of one with an evaluation."""
    rank, size = place()
    engine = build(Case(ZeroConfig(stage=stage, bucket_mb=0.25)))
    inputs = micro_batches(batch(0, size, 1), rank)[0]
    steps = []
    for step in (None, given_up, evaluated):
        if step is None:
            engine.backward(engine(*inputs))
        else:
            step(engine, inputs)
        engine.step()
        last = engine.ledger.last_step
        steps.append((dict(last.calls), dict(last.nbytes)))
    return steps


def test_what_was_given_up_and_an_evaluation_between_belong_to_no_step() -> None:
    for by_rank in run_over([0, 1, 2, 3], traffic_of_steps, 2):
        for ordinary, after_zero_grad, with_evaluation in by_rank:
            assert ordinary[0].keys() == {"reduce", "gather", "norm"}
            assert after_zero_grad == ordinary
            assert with_evaluation == ordinary


def test_gloos_own_reduction_is_counted_with_all_that_it_sends() -> None:
    """It is made of a whole all-reduce, so that every byte is sent twice."""
    ordered = [Case(ZeroConfig(stage=stage, bucket_mb=0.25), num_steps=1) for stage in range(4)]
    native = [case.with_zero(reduction="native") for case in ordered]
    results = run_over([*ordered, *native], reduced_nbytes, 2)
    assert [nbytes for by_rank in results[4:] for nbytes in by_rank] == [
        2 * nbytes for by_rank in results[:4] for nbytes in by_rank
    ]


def reduced_nbytes(case: Case) -> int:
    return train(case).ledger.last_step.nbytes["reduce"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_alone_sends_nothing(stage: int) -> None:
    step = last_step(Case(ZeroConfig(stage=stage, bucket_mb=0.05)))
    assert (step["calls"], step["sent"], step["theory"]) == ({}, 0, 0)
