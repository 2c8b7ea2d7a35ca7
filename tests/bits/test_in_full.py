"""The products of tests/distributed in full, on real ranks. `make test` has of them what a fault meets first."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import test_calls
import test_hosts
import test_parameters
import test_parity
import test_precision
import test_refusals

from zerotrain.testing import run_ranks

NUM_STEPS = 3


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", test_parity.TRAININGS)
def test_every_training_on_any_number_of_ranks(name: str, num_ranks: int) -> None:
    case = replace(test_parity.TRAININGS[name], num_steps=NUM_STEPS)
    sizes, overlaps = ((0.02, 0.25, 25), (True, False)) if num_ranks == 2 else ((0.02, 25), (True,))
    settings = [
        case.with_zero(stage=stage, bucket_mb=bucket_mb, overlap=overlap)
        for stage, bucket_mb, overlap in product(test_parity.STAGES, sizes, overlaps)
    ]
    test_parity.require_bits(case, num_ranks, settings)


@pytest.mark.parametrize("way", test_parity.WAYS)
def test_every_way_to_a_sum_at_every_stage(way: str) -> None:
    test_parity.require_bits_of(test_parity.WAYS[way], lambda _: test_parity.STAGES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_native_reduction_of_three_ranks_at_every_stage(precision: str) -> None:
    test_parity.test_the_native_reduction_agrees_up_to_rounding(precision, test_parity.STAGES)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 1), (3, 2)])
def test_half_precisions_at_every_stage(num_ranks: int, num_micro_batches: int) -> None:
    test_precision.require_bits(num_ranks, num_micro_batches, lambda _: test_parity.STAGES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_hosts_at_every_stage(precision: str) -> None:
    test_hosts.require_bits_of_stages(precision, test_hosts.STAGES)


def test_late_ranks_on_two_hosts_at_every_stage() -> None:
    test_hosts.require_bits_where_late(list(product(test_hosts.STAGES, ("gather", "reduction"))))


def test_every_way_to_call_a_model_at_every_stage() -> None:
    runs = [test_calls.Run(name, stage) for name, stage in product(test_calls.CALLS, test_calls.STAGES)]
    test_calls.expect_reference(runs, 2)


def test_the_hard_ways_to_call_a_model_with_a_late_rank_and_with_the_reduction_of_the_backend() -> None:
    test_calls.expect_reference(test_calls.late_runs(lambda _: test_calls.HARD_STAGES), 3)
    test_calls.expect_reference(test_calls.native_runs(lambda _: test_calls.HARD_STAGES), 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_hard_ways_to_call_a_model(num_ranks: int) -> None:
    ways = product(test_calls.HARD, test_calls.HARD_STAGES)
    test_calls.expect_reference([test_calls.Run(name, stage) for name, stage in ways], num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_use_different_parts(num_ranks: int) -> None:
    kinds = list(product(test_parameters.UNEVEN, range(4)))
    runs = [test_parameters.Run(case, stage) for case, stage in kinds]
    runs += [test_parameters.Run(case, stage, bucket_mb=0.004, late_rank=stage % num_ranks) for case, stage in kinds]
    assert test_parameters.differing(runs, num_ranks) == []


def test_hard_parameters_on_three_ranks_in_both_precisions() -> None:
    runs = [
        test_parameters.Run(case, stage, precision, num_micro_batches=2, bucket_mb=0.003, late_rank=stage % 3)
        for case, stage, precision in product(test_parameters.HARD, range(4), ("fp32", "bf16"))
    ]
    assert test_parameters.differing(runs, 3) == []


@pytest.mark.parametrize("stage", [0, 1])
def test_each_refusal_at_the_stages_that_share_them(stage: int, tmp_path: Path) -> None:
    names = test_refusals.cases_at(stage)
    assert run_ranks(test_refusals.wrong_after, 2, stage, 1 + stage % 2, names, tmp_path) == [[], []]
