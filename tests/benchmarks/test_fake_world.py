"""One rank of a world whose other ranks do not exist."""

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.fake_world import main as fake_world
from benchmarks.small_parameters import FAKE_RANKS, Blocks, bare_step, engine_step, python_calls
from tests.ranks import run_ranks
from zerotrain.device import memory as heap


def test_an_engine_runs_in_worlds_of_any_size(tmp_path: Path) -> None:
    words = "--size tiny --engines zero3 --ranks 8 64 --rounds 1 --steps 1 --out"
    assert fake_world([*words.split(), str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "8 ranks: ms/step" in table
    assert "64 ranks: peak MB" in table
    assert re.search(r"\| zerotrain stage 3 \| [0-9.]+ \|", table)


def calls_of_the_engine(num_parameters: int, stages: Sequence[int]) -> list[int]:
    """The Python calls of a step at some stages, less those of the bare model."""
    dist.destroy_process_group()  # that of the process, whose other ranks are real
    # What is gathered stays what the memory was. From here on that is new and zero, and no longer what was freed: of
    # that the loss was nan in 20 steps in a row (2026-11-22). M_MMAP_THRESHOLD of malloc.h.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    heap._SET_BY_USER = True  # or the engine says otherwise
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_RANKS)
    bare = python_calls(bare_step(Blocks(num_parameters)))
    return [calls_of_an_update(engine_step(Blocks(num_parameters), stage)) - bare for stage in stages]


def calls_of_an_update(step: Callable[[], Any]) -> int:
    """Of a step that updates the weights: parameters that a fake group never sent may be no numbers, and their step is
    skipped, with fewer calls."""
    # Until each buffer on loan has met each bucket: the views of a bucket in a buffer are made once.
    for _ in range(6):
        step()
    outcomes: list[Any] = []
    for _ in range(50):
        num_calls = python_calls(lambda: outcomes.append(step()))
        if not outcomes[-1].skipped:
            return num_calls
    raise AssertionError("50 steps were skipped")


def both_sizes(stages: Sequence[int]) -> list[tuple[int, int]]:
    few, many = calls_of_the_engine(10, stages), calls_of_the_engine(10_000, stages)
    return list(zip(few, many, strict=True))


def test_a_thousand_times_the_parameters_do_not_double_the_python_calls_of_a_step(
    all_rows: bool,
) -> None:
    """At stages 2 and 3, and at each with --all-rows."""
    [by_stage] = run_ranks(both_sizes, 1, range(4) if all_rows else (2, 3))
    assert all(0 < few < many < 2 * few for few, many in by_stage), by_stage
