"""What ranks tell each other with the norm: in the same step on all, without a collective of its own."""

import pytest
import torch

import zerotrain
from tests.unit.engine.habits import build
from tests.unit.engine.parts import seeded
from zerotrain.testing.fake_wire import run_threads

LARGEST = 2**31


@pytest.mark.case("stopping", "SIGTERM, SIGINT or SIGUSR1 to the launcher, to one rank, to all processes")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_has_in_a_step_all_are_told_in_that_step_and_only_then(stage: int, size: int) -> None:
    teller = size - 1

    def four_steps(world: zerotrain.World) -> list[tuple[bool, tuple[int, ...]]]:
        engine = build(world, stage, "fp32", seeded(lambda: torch.nn.Linear(8, 4)))
        told = []
        for signal, factor in ((0, 1.0), (LARGEST, 1.0), (15, 3e38), (0, 1.0)):
            if world.rank == teller:
                engine.signal = signal
            engine.backward(engine(torch.ones(4, 8)).sum() * factor)
            result = engine.step()
            told.append((result.skipped, result.signals))
        return told

    def by_rank(signal: int) -> tuple[int, ...]:
        return tuple(signal if rank == teller else 0 for rank in range(size))

    results, _ = run_threads(four_steps, size, late_rank=teller)
    expected = [(False, by_rank(0)), (False, by_rank(LARGEST)), (True, by_rank(15)), (False, by_rank(0))]
    assert results == [expected] * size
