"""`python -m benchmarks`: our engine beside its peers: a table, results.json, report.md and chart.png."""

import argparse
import shlex
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path

from benchmarks.chart import draw
from benchmarks.engines import ENGINES, choose_engines
from benchmarks.errors import BenchmarkError
from benchmarks.network import LINKS_BIT_PER_S, SHARED, Network, link, loopback
from benchmarks.report import report
from benchmarks.results import Comparison, Measurement, missed_rounds
from benchmarks.rounds import interleaved, machine, measure_in_quiet
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import SIZES, Workload
from zerotrain.comm.world import choose_device
from zerotrain.errors import ConfigError
from zerotrain.settings import AUTO


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of a benchmark. Ends the process with exit code 2 on one that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--engines", default="all", help=f"comma-separated, or all: {', '.join(ENGINES)}")
    add("--size", default="13.9m", choices=SIZES, help="the GPT and its micro-batch")
    add("--ranks", type=_at_least_one, default=2)
    add("--precision", default="fp32", choices=("fp32", "bf16"))
    add("--accumulation", type=_at_least_one, default=1, help="micro-batches in a step")
    add("--rounds", type=_at_least_one, default=5, help="times each engine is run, in turn with the others")
    add("--warmup", type=_at_least_one, default=3, help="steps before the clock starts")
    add("--steps", type=_at_least_one, default=8, help="steps on the clock in each run")
    add("--bucket-mb", type=bucket_mb, default="auto", help="MiB of zerotrain's buckets, or auto")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cpu: gloo, one thread a rank; cuda: NCCL")
    add("--clip", type=_positive, help="the norm that gradients are clipped to; default: they are not")
    add("--compile", action="store_true", help="torch.compile, as each engine documents it")
    add("--link", choices=LINKS_BIT_PER_S, help="ranks on two hosts joined by a link of this rate; default: one host")
    add("--max-load", type=_positive, default=1.0, help="share of the machine others may use before a run is repeated")
    add("--time-limit", type=_positive, help="seconds; runs that would end later are left out; default: no limit")
    add("--out", type=Path, default=Path("outputs/benchmark"), help="folder for the results")
    return parser.parse_args(arguments)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least 1")
    return value


def bucket_mb(text: str) -> float | str:
    """A number above 0, or auto."""
    return text if text == AUTO else _positive(text)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def choose_network(options: argparse.Namespace) -> AbstractContextManager[Network]:
    """Where the ranks are to meet. GPUs of one machine, and a rank alone, need no network of their own."""
    if options.device == "cuda" or (options.ranks == 1 and not options.link):
        return nullcontext(SHARED)
    return link(options.link) if options.link else loopback()


def run(options: argparse.Namespace, command: str) -> Comparison:
    """Measure, with a line of progress for each run. An engine whose ranks fail is not run again.

    Args:
        command: what was typed, to be kept with the figures.

    Raises:
        BenchmarkError, ConfigError: it cannot be run as asked.
    """
    choose_device(options.device, options.ranks - 1)
    limit = TimeLimit(options.time_limit)
    engines, left_out = choose_engines(options.engines, options.precision, compiled=options.compile)
    for name, reason in left_out.items():
        print(f"{name} left out: {reason}", file=sys.stderr, flush=True)
    workload = Workload(
        size=options.size,
        precision=options.precision,
        num_ranks=options.ranks,
        num_micro_batches=options.accumulation,
        num_warmup_steps=options.warmup,
        num_steps=options.steps,
        bucket_mb=options.bucket_mb,
        device=options.device,
        compiled=options.compile,
        max_grad_norm=options.clip,
    )
    measurements: list[Measurement] = []
    failures: dict[str, str] = {}
    runs = interleaved(engines, options.rounds)
    with choose_network(options) as network:
        for count, engine in enumerate(runs, start=1):
            if engine in failures or not limit.has_room_for(engine):
                continue
            try:
                measurement = measure_in_quiet(engine, workload, network, options.max_load, limit)
            except BenchmarkError as error:
                if limit.left_s > 0:
                    failures[engine] = str(error)
                print(f"[{count}/{len(runs)}] {error}", file=sys.stderr, flush=True)
                continue
            measurements.append(measurement)
            print(
                f"[{count}/{len(runs)}] {engine:<12} {measurement.step_ms:8.1f} ms/step, loss {measurement.loss:.5f}, "
                f"others used {measurement.other_load:.0%} of the machine",
                flush=True,
            )
    if not measurements:
        raise BenchmarkError("no engine could be measured" + (" in time" if limit.left_s == 0 else ""))
    left_out |= missed_rounds(engines, measurements, failures, options.rounds, limit.limit_s)
    return Comparison(
        command=command,
        date=date.today().isoformat(),
        machine=machine(),
        workload=workload,
        link_bit_per_s=network.bit_per_s,
        measurements=measurements,
        failures=failures,
        left_out=left_out,
    )


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    options = parse(arguments)
    try:
        comparison = run(options, shlex.join(["python", "-m", "benchmarks", *arguments]))
    except (BenchmarkError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return write(comparison, options.out)


def write(comparison: Comparison, folder: Path) -> int:
    """Leave the results in a folder, show the table, and return the exit code: 1 where an engine failed."""
    folder.mkdir(parents=True, exist_ok=True)
    comparison.save(folder / "results.json")
    text = report(comparison)
    (folder / "report.md").write_text(text)
    print(f"\n{text}\nwritten to {folder}")
    try:
        draw(comparison, folder / "chart.png")
    except ImportError:
        print("without chart.png: matplotlib is not installed; pip install -e '.[bench]'")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    # SIGTERM as Ctrl-C: ranks and network end with the benchmark.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
