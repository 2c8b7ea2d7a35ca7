"""The products of tests/distributed in full, on real ranks. `make test` has of them what a fault meets first."""

from dataclasses import replace
from itertools import product

import calls
import pytest
import test_calls
import test_parameters
import test_parity

NUM_STEPS = 3


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", test_parity.TRAININGS)
@pytest.mark.thinned(3)
def test_every_training_on_any_number_of_ranks(name: str, num_ranks: int) -> None:
    case = replace(test_parity.TRAININGS[name], num_steps=NUM_STEPS)
    sizes = (0.02, 0.25, 25) if num_ranks == 2 else (0.02, 25)
    settings = [
        case.with_zero(stage=stage, bucket_mb=bucket_mb, overlap=num_ranks > 2 or (stage + number) % 2 == 0)
        for stage, (number, bucket_mb) in product(test_parity.STAGES, enumerate(sizes))
    ]
    test_parity.require_bits(case, num_ranks, settings)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_hard_ways_to_call_a_model(num_ranks: int) -> None:
    ways = product(calls.HARD, test_calls.HARD_STAGES)
    test_calls.expect_reference([test_calls.Run(name, stage) for name, stage in ways], num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.thinned(2, first=1)
def test_ranks_that_use_different_parts(num_ranks: int) -> None:
    """Of each case and stage in turns with one bucket, and with small ones while a rank is late."""
    kinds = [
        (case, stage, (number + stage + num_ranks) % 2)
        for number, case in enumerate(test_parameters.UNEVEN)
        for stage in range(4)
    ]
    runs = [test_parameters.Run(case, stage) for case, stage, is_late in kinds if not is_late]
    runs += [
        test_parameters.Run(case, stage, bucket_mb=0.004, late_rank=stage % num_ranks)
        for case, stage, is_late in kinds
        if is_late
    ]
    assert test_parameters.differing(runs, num_ranks) == []
