"""`python -m benchmarks.fake_world`: one rank of a large world, whose other ranks do not exist.

PyTorch's fake process group answers every collective at once, so what is left is one rank's own time and memory: what
the engine's bookkeeping costs, and how it grows with the number of ranks. The numbers it computes mean nothing.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engines import ENGINES, choose_engines
from benchmarks.rank import RankResult, measure, own_device
from benchmarks.report import markdown, megabytes
from benchmarks.rounds import machine
from benchmarks.workload import SIZES, Workload

DEFAULT_ENGINES = "zero0,zero1,zero2,zero3"


def measure_alone(engine: str, workload: Workload) -> RankResult:
    """Rank 0 of a fake world. Runs in a process of its own: a world lasts as long as its process."""
    device = own_device(workload)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workload.num_ranks)
    return measure(engine, workload, device)


def compare(engines: list[str], workloads: list[Workload], num_rounds: int) -> dict[tuple[str, int], list[RankResult]]:
    """Measure every engine in every workload, in turn, `num_rounds` times; by (engine, number of ranks)."""
    results: dict[tuple[str, int], list[RankResult]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for _ in range(num_rounds):
            for engine in engines:
                for workload in workloads:
                    result = processes.submit(measure_alone, engine, workload).result()
                    results.setdefault((engine, workload.num_ranks), []).append(result)
    return results


def report(engines: list[str], num_ranks: list[int], results: dict[tuple[str, int], list[RankResult]]) -> str:
    """A row for each engine: its time in each world, the last to the first, and its peak memory in the first."""
    rows = [
        ["engine", *(f"ms/step, {size} ranks" for size in num_ranks), "last / first", f"peak MB, {num_ranks[0]} ranks"]
    ]
    for engine in engines:
        times_ms = [
            statistics.median(time_ms for result in results[engine, size] for time_ms in result.step_ms)
            for size in num_ranks
        ]
        peak_nbytes = statistics.median(
            result.device_peak_nbytes or result.peak_nbytes - result.start_nbytes
            for result in results[engine, num_ranks[0]]
        )
        rows.append(
            [
                ENGINES[engine].label,
                *(f"{time_ms:.1f}" for time_ms in times_ms),
                f"{times_ms[-1] / times_ms[0]:.2f}",
                megabytes(peak_nbytes),
            ]
        )
    return markdown(rows)


def main() -> None:
    """Compare the engines in the worlds that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake_world", description=__doc__)
    add = parser.add_argument
    add("--engines", default=DEFAULT_ENGINES, help=f"comma-separated: {', '.join(ENGINES)}")
    add("--ranks", type=int, nargs="+", default=[8, 1024], help="sizes of the worlds")
    add("--size", default="13.9m", choices=SIZES)
    add("--precision", default="fp32", choices=("fp32", "bf16"))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=8)
    options = parser.parse_args()
    engines = choose_engines(options.engines, options.precision)
    workloads = [
        Workload(
            size=options.size,
            precision=options.precision,
            num_ranks=num_ranks,
            num_steps=options.steps,
            device=options.device,
        )
        for num_ranks in options.ranks
    ]
    results = compare(engines, workloads, options.rounds)
    print(f"GPT {options.size}, {options.precision}, {options.device}; {machine()}\n")
    print(report(engines, options.ranks, results))


if __name__ == "__main__":
    main()
