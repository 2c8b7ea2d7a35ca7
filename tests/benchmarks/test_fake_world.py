"""One rank of a world whose other ranks do not exist."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.fake_world import main as fake_world
from benchmarks.small_parameters import Blocks, bare_step, engine_step, python_calls


def test_an_engine_runs_in_worlds_of_any_size(tmp_path: Path) -> None:
    words = "--size tiny --engines zero3 --ranks 8 64 --rounds 1 --steps 1 --out"
    assert fake_world([*words.split(), str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "8 ranks: ms/step" in table
    assert "64 ranks: peak MB" in table
    assert re.search(r"\| zerotrain stage 3 \| [0-9.]+ \|", table)


def test_without_time_every_run_is_told_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert fake_world(["--engines", "zero3", "--ranks", "8", "--rounds", "1", "--time-limit", "0"]) == 1
    printed = capsys.readouterr()
    assert "zero3, 8 ranks left out: no time left" in printed.err
    assert "| zerotrain stage 3 | not measured |" in printed.out


def calls_of_the_engine(stage: int, num_parameters: int) -> int:
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    step = engine_step(Blocks(num_parameters), stage)
    # Until each buffer on loan has met each bucket: the views of a bucket in a buffer are made once.
    for _ in range(6):
        step()
    # The most of some steps: parameters that a fake group never sent may be no numbers, and their step is skipped.
    most = max(python_calls(step) for _ in range(3))
    return most - python_calls(bare_step(Blocks(num_parameters)))


def test_a_thousand_times_the_parameters_do_not_double_the_python_calls_of_a_step() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        for stage in range(4):
            few, many = processes.map(calls_of_the_engine, [stage, stage], [10, 10_000])
            assert 0 < few < many < 2 * few
