"""The products of tests/unit in full, with threads as ranks. `make test` has a part of each."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.checkpoint import test_beside_training
from tests.unit.checkpoint.runs import KINDS
from tests.unit.engine import test_inference_mode, test_offload, test_set_stage, test_weight_habits
from tests.unit.engine.habits import EVERYWHERE

SIZES = (1, 2, 3)


@pytest.mark.parametrize(("kind", "size", "where"), product(KINDS, SIZES, test_offload.TIERS))
def test_what_is_offloaded(kind: str, size: int, where: str, tmp_path: Path) -> None:
    test_offload.test_wherever_it_lies_and_whatever_the_stage_the_bits_are_the_same(kind, size, where, tmp_path)


@pytest.mark.parametrize(("kind", "size"), product(KINDS, SIZES))
def test_stages_that_change(kind: str, size: int) -> None:
    test_set_stage.test_the_stage_changes_in_mid_run_and_the_bits_do_not(kind, size)


@pytest.mark.parametrize(("kind", "stage", "size"), product(KINDS, range(4), SIZES[1:]))
def test_training_beside_a_save(
    kind: str, stage: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_beside_training.test_training_beside_a_save_comes_to_the_same_bits_and_the_state_at_its_begin_is_saved(
        kind, stage, size, tmp_path, monkeypatch
    )


@pytest.mark.parametrize(
    ("call", "settings"), product(test_inference_mode.CALLS, range(len(test_inference_mode.SETTINGS)))
)
def test_calls_in_inference_mode(call: str, settings: int, tmp_path: Path) -> None:
    test_inference_mode.test_a_call_within_a_mode_without_gradients_comes_to_the_bits_of_one_outside(
        call, settings, torch.inference_mode, tmp_path
    )


@EVERYWHERE
@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("write", test_weight_habits.WRITES.values(), ids=test_weight_habits.WRITES)
def test_weights_that_users_write(
    write: Callable[[nn.Module], None], scoped: bool, stage: int, size: int, precision: str
) -> None:
    if scoped or stage < 3:  # at 3 it is refused outside
        test_weight_habits.require_trained_on(write, stage, size, precision, scoped=scoped)
