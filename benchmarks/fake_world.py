"""`python -m benchmarks.fake_world`: one rank of a large world, whose other ranks do not exist.

PyTorch's fake process group answers every collective at once, so what is left is one rank's own time and memory: what
the engine's bookkeeping costs, and how it grows with the number of ranks. The numbers it computes mean nothing.
"""

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engines import ENGINES, choose_engines
from benchmarks.errors import BenchmarkError
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
    """A row for each engine: its time and peak memory in each world, and the last world's time to the first's."""
    head = ["engine", *(f"{size:,} ranks: {what}" for size in num_ranks for what in ("ms/step", "peak MB"))]
    rows = [[*head, "time, last to first"]]
    for engine in engines:
        times_ms, cells = [], []
        for size in num_ranks:
            rounds = results[engine, size]
            times_ms.append(statistics.median(time_ms for each in rounds for time_ms in each.step_ms))
            peak_nbytes = statistics.median(
                each.peak_nbytes - each.start_nbytes if each.device_peak_nbytes is None else each.device_peak_nbytes
                for each in rounds
            )
            cells += [f"{times_ms[-1]:.1f}", megabytes(peak_nbytes)]
        rows.append([ENGINES[engine].label, *cells, f"{times_ms[-1] / times_ms[0]:.2f}"])
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
    try:
        engines = choose_engines(options.engines, options.precision)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    settings = {"size": options.size, "precision": options.precision, "device": options.device}
    workloads = [Workload(num_ranks=num_ranks, num_steps=options.steps, **settings) for num_ranks in options.ranks]
    results = compare(engines, workloads, options.rounds)
    print(f"GPT {options.size}, {options.precision}, {options.device}; {machine()}")
    print("Peak MB: of the device's memory, or resident above the interpreter's own on the CPU\n")
    print(report(engines, options.ranks, results))


if __name__ == "__main__":
    main()
