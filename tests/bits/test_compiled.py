"""Compiled units: other bits than those of plain PyTorch, and the same at every stage."""

import shutil
import sysconfig
from itertools import product
from pathlib import Path

import pytest
from test_unit_forward import Run, train_over

HAS_COMPILER = bool(shutil.which("g++")) and (Path(sysconfig.get_path("include")) / "Python.h").exists()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile needs g++ and Python.h")


@needs_compiler
def test_compiled_units_give_the_same_bits_at_every_stage(all_rows: bool, tmp_path: Path) -> None:
    pairs = [*product(range(4), (False, True))] if all_rows else [(0, False), (2, False), (3, True)]
    runs = [Run(stage, compile=True, checkpointing=both) for stage, both in pairs]
    plain, *compiled = train_over([Run(0), *runs], 2, tmp_path)
    # One graph for all blocks and one for the loss, at all stages: a stage changes nothing that a graph depends on.
    assert [each["num_graphs"] for each in (plain, *compiled)] == [0, 2] + [0] * (len(pairs) - 1)
    assert len({each["sha256"] for each in compiled}) == 1
    assert compiled[0]["sha256"] != plain["sha256"]  # but for this, docs/reference/bits.md would promise more
    assert compiled[0]["losses"] == pytest.approx(plain["losses"], rel=1e-4)
