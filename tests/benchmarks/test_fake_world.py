"""One rank of a world whose other ranks do not exist."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.fake_world import compare, report
from benchmarks.small_parameters import Blocks, bare_step, engine_step, python_calls
from benchmarks.workload import Workload


def test_an_engine_runs_in_worlds_of_any_size() -> None:
    workloads = [Workload(size="tiny", num_ranks=num_ranks, num_warmup_steps=1, num_steps=1) for num_ranks in (8, 64)]
    table = report(["zero3"], [8, 64], compare(["zero3"], workloads, num_rounds=1))
    assert "8 ranks: ms/step" in table
    assert "64 ranks: peak MB" in table
    assert "zerotrain stage 3" in table


def calls_of_the_engine(stage: int, num_parameters: int) -> int:
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    step = engine_step(Blocks(num_parameters), stage)
    # Until each buffer on loan has met each bucket: the views of a bucket in a buffer are made once.
    for _ in range(6):
        step()
    # The most of some steps: parameters that a fake group never sent may be no numbers, and their step is skipped.
    most = max(python_calls(step) for _ in range(5))
    return most - python_calls(bare_step(Blocks(num_parameters)))


def test_a_thousand_times_the_parameters_do_not_double_the_python_calls_of_a_step() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        for stage in range(4):
            few, many = processes.map(calls_of_the_engine, [stage, stage], [10, 10_000])
            assert 0 < few < many < 2 * few
