"""Each row of docs/results/plan.md: states to the byte, and the peak of all tensors, never above the plan."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.bits.test_compiled import needs_compiler
from tests.ranks.processes import run_ranks
from tests.unit.preflight.rows import Held, Row, busiest, held, misfits, planned, rows
from zerotrain.comm.world import World

COMPILED = "model.compile=true"
ROWS = rows()
ALONE = [row for row in ROWS if row.ranks == 1 and COMPILED not in row.settings]


def test_the_table_has_all_kinds_of_rows():
    assert {row.model for row in ROWS} == {"gpt", "mlp", "llama", "lora", "mixtral", "convnet"}
    assert {(row.stage, row.precision) for row in ALONE} == set(product(range(4), ("fp32", "bf16")))
    assert {row.ranks for row in ROWS} == {1, 2, 4}
    assert len(ROWS) == len(set(ROWS)) >= 50


@pytest.mark.parametrize("part", range(4))
@pytest.mark.thinned(2)
def test_a_plan_is_what_one_rank_holds_at_most(part: int, tmp_path: Path):
    world = World(0, 1, 0, torch.device("cpu"))

    found = [(row, planned(row, tmp_path), held(row, world, tmp_path)) for row in ALONE[part::4]]

    wrong = [line for each in found for line in misfits(*each)]
    assert not wrong, "\n".join(wrong)


@needs_compiler
def test_compiled_units_hold_no_more_than_is_planned_of_others(tmp_path: Path):
    [row] = [row for row in ROWS if COMPILED in row.settings]

    wrong = misfits(row, planned(row, tmp_path), held(row, World(0, 1, 0, torch.device("cpu")), tmp_path))

    assert not wrong, "\n".join(wrong)


def _on_a_rank(shared: list[Row], folder: Path) -> list[Held]:
    world = World.current(torch.device("cpu"))
    return [held(row, world, folder) for row in shared]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plan_is_what_the_busiest_rank_holds_and_sends(num_ranks: int, tmp_path: Path):
    shared = [row for row in ROWS if row.ranks == num_ranks]

    found = run_ranks(partial(_on_a_rank, shared, tmp_path), num_ranks)

    pairs = zip(shared, map(busiest, map(list, zip(*found, strict=True))), strict=True)
    wrong = [line for row, most in pairs for line in misfits(row, planned(row, tmp_path), most)]
    assert not wrong, "\n".join(wrong)
