"""What `make test` leaves out of products of settings, on real ranks and on threads."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import calls
import pytest
import test_calls
import test_parameters
import test_parity
import test_precision
import test_refusals
import torch
from cases import others_than, three_stages, two_stages
from torch import nn

from tests.unit.checkpoint import test_beside_training
from tests.unit.checkpoint.runs import KINDS
from tests.unit.engine import (
    test_engine_between_steps as test_inference_mode,
    test_offload,
    test_set_stage,
    test_weight_habits,
)
from tests.unit.engine.habits import EVERYWHERE

SIZES = (1, 2, 3)
BESIDE_A_SAVE = [
    (kind, stage, 2 + (index // 2 + stage) % 2) for index, kind in enumerate(KINDS) for stage in (0, 1 + index % 2, 3)
]
IN_MODE = list(product(test_inference_mode.CALLS, range(len(test_inference_mode.SETTINGS)), [torch.inference_mode]))


# ---- on real ranks


@pytest.mark.parametrize("way", test_parity.WAYS)
def test_each_way_to_a_sum(way: str) -> None:
    test_parity.require_bits_of(test_parity.WAYS[way], others_than(three_stages))


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 2), ("bf16", 1)])
def test_the_native_reduction_of_three_ranks(precision: str, stage: int) -> None:
    test_parity.test_the_native_reduction_agrees_up_to_rounding(precision, [stage])


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 1), (3, 2)])
def test_half_precisions(num_ranks: int, num_micro_batches: int) -> None:
    test_precision.require_bits(num_ranks, num_micro_batches, others_than(two_stages))


def test_each_way_to_call_a_model() -> None:
    stages_of = others_than(test_calls.stages_of)
    runs = [test_calls.Run(name, stage) for number, name in enumerate(calls.CALLS) for stage in stages_of(number)]
    test_calls.expect_reference(runs, 2)


def test_hard_ways_to_call_a_model_late_and_with_the_reduction_of_the_backend() -> None:
    test_calls.expect_reference(test_calls.late_runs(lambda number: test_calls.two_or_zero(number)[:1]), 3)
    test_calls.expect_reference(test_calls.native_runs(lambda number: test_calls.zero_or_two(number)[:1]), 2)


def test_hard_parameters_on_three_ranks() -> None:
    runs = [test_parameters.hard_run(*each) for each in product(test_parameters.HARD, range(4), test_parameters.WIRE)]
    assert test_parameters.differing([run for run in runs if run not in test_parameters.HARD_RUNS], 3) == []


@pytest.mark.parametrize("placement", test_refusals.ALL)
@pytest.mark.thinned(2)
def test_refusals_at_another_placement(placement: int, tmp_path: Path) -> None:
    test_refusals.require_bits_after_refusals(placement, [(placement + 1) % len(test_refusals.ALL)], tmp_path)


# ---- on threads


@pytest.mark.parametrize(
    ("kind", "size", "where"),
    [(kind, size, test_offload.TIERS[(index + size) % 2]) for index, kind in enumerate(KINDS) for size in SIZES],
)
@pytest.mark.thinned(2)
def test_what_is_offloaded(kind: str, size: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_offload, "NUM_STEPS", 4)
    test_offload.test_wherever_it_lies_and_whatever_the_stage_the_bits_are_the_same(kind, size, where, tmp_path)


@pytest.mark.parametrize(
    ("kind", "size"), [each for each in product(KINDS, SIZES) if each not in test_set_stage.PLACES]
)
@pytest.mark.thinned(2)
def test_stages_that_change(kind: str, size: int) -> None:
    test_set_stage.test_the_stage_changes_in_mid_run_and_the_bits_do_not(kind, size)


@pytest.mark.parametrize(
    ("kind", "stage", "size"), [each for each in BESIDE_A_SAVE if each not in test_beside_training.PLACES]
)
@pytest.mark.thinned(2)
def test_training_beside_a_save(
    kind: str, stage: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_beside_training.test_training_beside_a_save_comes_to_the_same_bits_and_the_state_at_its_begin_is_saved(
        kind, stage, size, tmp_path, monkeypatch
    )


@pytest.mark.parametrize(
    ("call", "settings", "mode"), [each for each in IN_MODE if each not in test_inference_mode.CASES]
)
@pytest.mark.thinned(2)
def test_calls_in_inference_mode(call: str, settings: int, mode: object, tmp_path: Path) -> None:
    test_inference_mode.test_a_call_within_a_mode_without_gradients_comes_to_the_bits_of_one_outside(
        call, settings, mode, tmp_path
    )


@pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [each for each in EVERYWHERE.args[1] if each[0] < 3],  # at 3 always in a scope
)
@pytest.mark.parametrize("write", test_weight_habits.WRITES.values(), ids=test_weight_habits.WRITES)
@pytest.mark.thinned(2)
def test_weights_that_users_write(write: Callable[[nn.Module], None], stage: int, size: int, precision: str) -> None:
    test_weight_habits.require_trained_on(write, stage, size, precision, scoped=size == 3)
