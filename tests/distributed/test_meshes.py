"""`zero.shard_size` on real ranks: the bits of plain PyTorch, bytes and memory at the formula, a late rank."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from cases import (
    Case,
    batch,
    be_late,
    build,
    hashes_over_ranks,
    micro_batches,
    place,
    reference_weights,
    run_over,
    sha256,
    train,
)
from test_memory import at_rest
from test_parity import TRAININGS
from test_traffic import NORM_NBYTES

from zerotrain.comm import collectives
from zerotrain.errors import ConfigError
from zerotrain.settings import ZeroConfig
from zerotrain.training.callbacks import console

MESH = ZeroConfig(reduction="ordered", bucket_mb=0.05, shard_size=2)


@pytest.mark.case(
    "hosts: Ranks of several hosts",
    "`zero.shard_size`: 2x2 ranks at stages 1 to 3 beside 4 without a mesh, fp32 and bf16, buckets of a few parameters "
    "and of all, with and without overlap, accumulated",
    "one sha256, that of plain PyTorch",
)
@pytest.mark.parametrize("name", ["fp32", "bf16, 3 micro-batches"])
def test_four_ranks_as_two_by_two_have_the_bits_of_plain_pytorch(name: str) -> None:
    case = replace(TRAININGS[name], zero=MESH)
    settings = [
        case.with_zero(stage=stage, bucket_mb=(0.02, 25)[stage % 2], overlap=stage != 2) for stage in (0, 1, 2, 3)
    ]
    settings += [case.with_zero(stage=3, bucket_mb=0.25), case.with_zero(stage=3, shard_size=None)]
    assert set(hashes_over_ranks(settings, 4)) == {sha256(reference_weights(case, 4))}


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [4, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eight_ranks_have_the_bits_of_plain_pytorch(precision: str, shard_size: int) -> None:
    case = Case(replace(MESH, shard_size=shard_size), precision=precision, num_micro_batches=2)
    settings = [case.with_zero(stage=stage, bucket_mb=mb) for stage in (1, 2, 3) for mb in (0.05, 25)]
    assert set(hashes_over_ranks(settings, 8)) == {sha256(reference_weights(case, 8))}


def train_with_a_late_rank(case: Case) -> str:
    """Rank 1 is late with what goes inside, rank 2 with what goes across."""
    engine = build(case)
    rank, size = place()
    if rank in (1, 2):
        journal, is_across = engine.collectives.journal, rank == 2
        on_time = journal.note
        delay = functools.partial(be_late, engine, ("gather", "reduction"), 0.02)
        delay()
        late = journal.note
        journal.note = lambda kind, name: (late if name.endswith("across") == is_across else on_time)(kind, name)
    for step in range(case.num_steps):
        engine.train_step(micro_batches(batch(step, size, case.num_micro_batches), rank))
    return engine.weights_sha256()


def test_a_rank_that_is_late_on_one_axis_changes_nothing() -> None:
    cases = [Case(replace(MESH, stage=stage)) for stage in (1, 3)]
    expected = sha256(reference_weights(cases[0], 4))
    assert run_over(cases, train_with_a_late_rank, 4) == [[expected] * 4] * 2


def last_step(case: Case) -> dict[str, Any]:
    engine = train(case)
    sent = engine.ledger.last_step
    return {
        "calls": dict(sent.calls),
        "sent": sent.sent_nbytes - sent.nbytes["norm"],
        "across": sent.across_nbytes,
        "theory": (engine.theoretical_sent_nbytes(1), engine.theoretical_across_nbytes(1)),
        "padded": sum(bucket.layout.padded_numel for bucket in engine.schedule.buckets),
        "numel": engine.num_parameters,
        "num_buckets": len(engine.schedule.buckets),
        "norm": sent.nbytes["norm"],
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_sends_across_what_the_formula_says(precision: str) -> None:
    """Sums of gradients go across in fp32, and gathers in the precision that computes."""
    cases = [Case(replace(MESH, stage=stage), precision=precision) for stage in (1, 2, 3)]
    bytes_across = {"fp32": 4 + 4, "bf16": 4 + 2}[precision]
    for case, by_rank in zip(cases, run_over(cases, last_step, 4), strict=True):
        for step in by_rank:
            assert step["theory"][1] == round(step["numel"] * bytes_across / 2 / 2)
            assert step["across"] == step["padded"] * bytes_across / 2 / 2
            assert step["across"] <= 1.02 * step["theory"][1]
            assert step["norm"] == 3 * NORM_NBYTES
            assert step["sent"] <= 1.02 * step["theory"][0]
            both = {"reduce": step["num_buckets"], "reduce across": step["num_buckets"], "norm": 1}
            assert step["calls"] == both | {"gather across": step["num_buckets"], "gather": step["calls"]["gather"]}
            if case.zero.stage < 3:
                assert step["sent"] == pytest.approx(step["theory"][0], rel=0.02)


def test_at_rest_a_rank_holds_its_part_of_the_parameters_and_its_shard_of_the_rest() -> None:
    cases = [Case(replace(MESH, stage=stage), precision="bf16") for stage in (2, 3)]
    for case, by_rank in zip(cases, run_over(cases, at_rest, 4), strict=True):
        for held in by_rank:
            padded, numel = held["padded_numel"], held["numel"]
            share = 2 if case.zero.stage == 3 else 1
            assert held["parameters"] == padded * 2 // share
            assert (held["gradients"], held["optimizer"]) == (padded * 2 // 4, padded * 12 // 4)
            assert held["theory"]["parameters"] == round(numel * 2 / share)
            assert held["theory"]["optimizer"] == round(numel * 12 / 4)


def on_hosts(of_ranks: list[str]) -> tuple[str, str] | str:
    """Build and train with shard_size=host on hosts of these names, by rank."""
    collectives.host_name = lambda: of_ranks[place()[0]]
    try:
        engine = train(Case(replace(MESH, shard_size="host", stage=3)))
    except ConfigError as error:
        return str(error)
    return console._ranks(engine).rpartition("; ")[2], engine.weights_sha256()


def test_a_host_is_a_shard() -> None:
    same, two, uneven, mixed = run_over([list("aaaa"), list("aabb"), list("aaab"), list("abab")], on_hosts, 4)
    expected = sha256(reference_weights(Case(MESH), 4))
    assert same == [("zero.shard_size=host: all ranks", expected)] * 4
    assert two == [("2 groups of 2 ranks, each with all parameters", expected)] * 4
    for refused, counts in ((uneven, "3, 1"), (mixed, "2, 2")):
        why = f"the hosts have {counts} ranks; all must have as many, numbered host by host"
        assert set(refused) == {f"zero.shard_size='host': {why}"}
