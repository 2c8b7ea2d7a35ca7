"""`python -m benchmarks.fake_world`: one rank of a large world, whose other ranks do not exist.

PyTorch's fake process group answers every collective at once, so what is left is one rank's own time and memory: what
the engine's bookkeeping costs, and how it grows with the number of ranks. The numbers it computes mean nothing.
"""

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.engines import ENGINES, choose_engines
from benchmarks.errors import BenchmarkError
from benchmarks.network import SHARED
from benchmarks.report import markdown, megabytes
from benchmarks.results import Measurement
from benchmarks.rounds import TIMEOUT_S, machine, measure
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import SIZES, Workload
from zerotrain.comm.world import choose_device
from zerotrain.errors import ConfigError

DEFAULT_ENGINES = "zero0,zero1,zero2,zero3"
Results = dict[tuple[str, int], list[Measurement]]
"""By engine and number of ranks."""


def compare(engines: list[str], workloads: list[Workload], num_rounds: int, limit: TimeLimit) -> Results:
    """Measure every engine in every workload, in turn, `num_rounds` times; a line tells of a run that was not made."""
    results: Results = {}
    for _ in range(num_rounds):
        for engine in engines:
            for workload in workloads:
                name = f"{engine}, {workload.num_ranks:,} ranks"
                if not limit.has_room_for(name):
                    print(f"{name} left out: no time left", file=sys.stderr, flush=True)
                    continue
                try:
                    with limit.timed(name):
                        measurement = measure(
                            engine, workload, SHARED, others_are_fake=True, timeout_s=min(TIMEOUT_S, limit.run_s)
                        )
                except BenchmarkError as error:
                    print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                    continue
                results.setdefault((engine, workload.num_ranks), []).append(measurement)
    return results


def report(engines: list[str], num_ranks: list[int], results: Results) -> str:
    """A row for each engine: its time and peak memory in each world, and the last world's time to the first's."""
    head = ["engine", *(f"{size:,} ranks: {what}" for size in num_ranks for what in ("ms/step", "peak MB"))]
    rows = [[*head, "time, last to first"]]
    for engine in engines:
        if any((engine, size) not in results for size in num_ranks):
            rows.append([ENGINES[engine].label, *["not measured"] * len(rows[0][1:])])
            continue
        times_ms, cells = [], []
        for size in num_ranks:
            rounds = results[engine, size]
            times_ms.append(statistics.median(each.step_ms for each in rounds))
            peak_nbytes = statistics.median(
                each.own_peak_nbytes if each.device_peak_nbytes is None else each.device_peak_nbytes for each in rounds
            )
            cells += [f"{times_ms[-1]:.1f}", megabytes(peak_nbytes)]
        rows.append([ENGINES[engine].label, *cells, f"{times_ms[-1] / times_ms[0]:.2f}"])
    return markdown(rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. Ends the process with exit code 2 on one that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake_world", description=__doc__)
    add = parser.add_argument
    add("--engines", default=DEFAULT_ENGINES, help=f"comma-separated: {', '.join(ENGINES)}")
    add("--ranks", type=int, nargs="+", default=[8, 1024], help="sizes of the worlds")
    add("--size", default="13.9m", choices=SIZES)
    add("--precision", default="fp32", choices=("fp32", "bf16"))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=8)
    add("--time-limit", type=float, help="seconds; runs that would end later are left out; default: no limit")
    add("--out", type=Path, help="file for the table, beside the screen")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Compare the engines in the worlds that the command line names and return the exit code."""
    options = parse(arguments)
    limit = TimeLimit(options.time_limit)
    try:
        choose_device(options.device, 0)
        engines, left_out = choose_engines(options.engines, options.precision)
    except (BenchmarkError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, reason in left_out.items():
        print(f"{name} left out: {reason}", file=sys.stderr, flush=True)
    settings = {"size": options.size, "precision": options.precision, "device": options.device}
    workloads = [Workload(num_ranks=num_ranks, num_steps=options.steps, **settings) for num_ranks in options.ranks]
    try:
        results = compare(engines, workloads, options.rounds, limit)
    except KeyboardInterrupt:
        return 130
    text = (
        f"GPT {options.size}, {options.precision}, {options.device}; {machine()}\n"
        "Peak MB: of the device's memory, or resident above the interpreter's own on the CPU\n\n"
        f"{report(engines, options.ranks, results)}\n"
    )
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
