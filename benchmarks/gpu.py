"""`python -m benchmarks.gpu`: what one GPU can tell of one size: eager, compiled, and as one rank of eight.

Minutes on a GPU are dear. So all engines start at once, compile beside each other, and take turns on the clock: while
one trains the others rest, with nothing of the GPU but their state. It ends within its time limit, and each part writes
its own figures when it is over, and says what it had no time for or what is not installed here.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks import fake_world
from benchmarks.__main__ import bucket_mb, write
from benchmarks.engines import NUM_EAGER_STEPS_OF_DDP, choose_engines
from benchmarks.errors import BenchmarkError
from benchmarks.network import SHARED
from benchmarks.results import Comparison, Measurement, missed_rounds
from benchmarks.rounds import Ranks, interleaved, machine
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import SIZES, Workload
from zerotrain.comm.world import choose_device
from zerotrain.errors import ConfigError

ENGINES = "zero0,zero0_graph,alone_graph,ddp_graph,fsdp2_graph,alone_bf16,ddp_bf16,fsdp2,deepspeed0,alone,ddp"
"""What differs on one rank, where every stage of ours is stage 0. What matters most comes first."""
ENGINES_AMONG_FAKE = "zero3,fsdp2,zero2,zero1,zero0,fsdp2_kept"
T = TypeVar("T")
Chosen = tuple[list[str], dict[str, str]]
"""As from `choose_engines`."""
TURNS_UNTIL = 0.8
"""Share of the time limit for what runs alone; the rest is for the fake ranks."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. Ends the process with exit code 2 on one that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--engines", default=ENGINES, help="of the eager and the compiled part, as for python -m benchmarks")
    add("--engines-among-fake", default=ENGINES_AMONG_FAKE, help="of the part with fake ranks; none: leave it out")
    add("--part", choices=("eager", "compiled"), help="default: both, and the part with fake ranks")
    add("--size", default="gpt2", choices=SIZES)
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--rounds", type=int, default=3, help="at most")
    add("--steps", type=int, default=20, help="steps on the clock in each run")
    add("--clip", type=float, default=1.0, help="the norm that gradients are clipped to, as runs do by default")
    add("--bucket-mb", type=bucket_mb, default="auto", help="MiB of zerotrain's buckets, or auto")
    add("--time-limit", type=float, default=440.0, help="seconds, all in all")
    add("--out", type=Path, default=Path("outputs/bench/gpu"), help="folder for the results")
    return parser.parse_args(arguments)


class Entry(NamedTuple):
    """An engine in a part."""

    part: str
    engine: str


class Turns:
    """Engines that are started at once and measured in turn.

    Args:
        workloads: by name of the part, such as "compiled".
        engines: of each part, with those that have been left out, and why.
    """

    def __init__(self, workloads: dict[str, Workload], engines: dict[str, Chosen], limit: TimeLimit) -> None:
        self._workloads, self._engines, self._limit = workloads, engines, limit
        self._measured: dict[str, list[Measurement]] = {part: [] for part in workloads}
        self._failures: dict[str, dict[str, str]] = {part: {} for part in workloads}

    def run(self, num_rounds: int) -> None:
        """Measure them, with a line for each. One that fails is left out from then on."""
        entries = [Entry(part, name) for part, (able, _) in self._engines.items() for name in able]
        with ExitStack() as stack:
            started = {
                each: stack.enter_context(Ranks(each.engine, self._workloads[each.part], SHARED)) for each in entries
            }
            for entry, ranks in started.items():
                self._unless_failed(entry, partial(ranks.rest, self._limit.left_s))
            ready = [entry for entry in entries if not self._has_failed(entry)]
            turns = interleaved(ready, num_rounds) if ready else []
            for count, entry in enumerate(turns, 1):
                if self._has_failed(entry) or not self._limit.has_room_for(str(entry)):
                    continue
                measured = self._unless_failed(entry, partial(self._turn, entry, started[entry]))
                if measured is not None:
                    self._measured[entry.part].append(measured)
                    print(
                        f"[{count}/{len(turns)}] {entry.engine:<12} {entry.part:<8} {measured.step_ms:8.1f} ms/step, "
                        f"host {measured.host_ms or 0.0:.1f}, loss {measured.loss:.5f}",
                        flush=True,
                    )

    def comparison(self, part: str, command: str, num_rounds: int) -> Comparison:
        """What was measured of a part."""
        able, left_out = self._engines[part]
        measured, failures = self._measured[part], self._failures[part]
        missed = missed_rounds(able, measured, failures, num_rounds, self._limit.limit_s)
        return Comparison(
            command=command,
            date=date.today().isoformat(),
            machine=machine(),
            workload=self._workloads[part],
            link_bit_per_s=None,
            measurements=measured,
            failures=failures,
            left_out=left_out | missed,
        )

    def _turn(self, entry: Entry, ranks: Ranks) -> Measurement:
        with self._limit.timed(str(entry)):
            measured = ranks.measure(self._limit.left_s)
            ranks.rest(self._limit.left_s)
        return measured

    def _has_failed(self, entry: Entry) -> bool:
        return entry.engine in self._failures[entry.part]

    def _unless_failed(self, entry: Entry, do: Callable[[], T]) -> T | None:
        try:
            return do()
        except BenchmarkError as error:
            if self._limit.left_s > 0:
                self._failures[entry.part][entry.engine] = str(error)
            print(f"{entry.engine}, {entry.part}: {error}", file=sys.stderr, flush=True)
            return None


def _engines_of(wanted: str, workload: Workload) -> Chosen:
    """The engines of a part; none where none can be run so, with a line that says why: the other parts go on."""
    try:
        return choose_engines(wanted, workload.precision, compiled=workload.compiled)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return [], {}


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    options = parse(arguments)
    limit = TimeLimit(options.time_limit)
    has_fake = options.engines_among_fake != "none" and options.part is None
    alone = Workload(
        size=options.size,
        precision="bf16",
        num_ranks=1,
        num_warmup_steps=NUM_EAGER_STEPS_OF_DDP + 1,  # the last of which is recorded
        num_steps=options.steps,
        device=options.device,
        bucket_mb=options.bucket_mb,
        max_grad_norm=options.clip,
    )
    workloads = {"eager": alone, "compiled": replace(alone, compiled=True)}
    if options.part is not None:
        workloads = {options.part: workloads[options.part]}
    try:
        choose_device(options.device, 0)
        engines = {part: _engines_of(options.engines, workload) for part, workload in workloads.items()}
        turns = Turns(workloads, engines, TimeLimit(options.time_limit * (TURNS_UNTIL if has_fake else 1.0)))
        turns.run(options.rounds)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    command = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    codes = []
    for part in workloads:
        comparison = turns.comparison(part, command, options.rounds)
        codes.append(write(comparison, options.out / f"{options.size}-{part}") if comparison.measurements else 2)
    if has_fake:
        words = ["--size", options.size, "--device", options.device, "--precision", "bf16"]
        words += ["--steps", str(options.steps), "--ranks", "8", "--rounds", "1"]
        words += ["--engines", options.engines_among_fake, "--time-limit", f"{max(1.0, limit.left_s):.0f}"]
        codes.append(fake_world.main([*words, "--out", str(options.out / f"{options.size}-fake-ranks.md")]))
    return max(codes)


if __name__ == "__main__":
    # SIGTERM as Ctrl-C, as in `python -m benchmarks`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
