"""`python -m benchmarks.gpu`: what one GPU can tell of one size: eager, compiled, and as one rank of eight.

Ends within its time limit, so that a machine lent for minutes still leaves its figures: each part writes its own when
it is over, and says what it had no time for or what is not installed here.
"""

import argparse
import signal
import sys
from pathlib import Path

from benchmarks import fake_world
from benchmarks.__main__ import main as compare
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import SIZES
from zerotrain.comm.ranks.world import choose_device
from zerotrain.errors import ConfigError

ENGINES = "zero0,alone_bf16,ddp_bf16,fsdp2,deepspeed0,alone,ddp"
"""What differs on one rank, where every stage of ours is stage 0. What matters most comes first."""
ENGINES_AMONG_FAKE = "zero3,fsdp2,zero2,zero1,zero0,fsdp2_kept"
EAGER_UNTIL, COMPILED_UNTIL = 0.35, 0.8
"""Shares of the time limit; compiling takes its time. The rest is for the fake ranks."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options. Ends the process with exit code 2 on one that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--engines", default=ENGINES, help="of the eager and the compiled part, as for python -m benchmarks")
    add("--engines-among-fake", default=ENGINES_AMONG_FAKE, help="of the part with fake ranks")
    add("--size", default="gpt2", choices=SIZES)
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--rounds", type=int, default=3, help="at most")
    add("--steps", type=int, default=20, help="steps on the clock in each run")
    add("--time-limit", type=float, default=440.0, help="seconds, all in all")
    add("--out", type=Path, default=Path("outputs/bench/gpu"), help="folder for the results")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the three parts one after the other, each whatever came of the others; return the worst exit code."""
    options = parse(arguments)
    limit = TimeLimit(options.time_limit)
    try:
        choose_device(options.device, 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    common = ["--size", options.size, "--device", options.device, "--precision", "bf16", "--steps", str(options.steps)]
    alone = [*common, "--ranks", "1", "--rounds", str(options.rounds), "--engines", options.engines]
    fake = [*common, "--ranks", "8", "--rounds", "1", "--engines", options.engines_among_fake]
    parts = (
        (compare, [*alone, "--out", str(options.out / options.size)], EAGER_UNTIL),
        (compare, [*alone, "--out", str(options.out / f"{options.size}-compiled"), "--compile"], COMPILED_UNTIL),
        (fake_world.main, [*fake, "--out", str(options.out / f"{options.size}-fake-ranks.md")], 1.0),
    )
    codes = []
    for run, words, until in parts:
        left_s = max(1.0, limit.left_s - (1 - until) * options.time_limit)
        codes.append(run([*words, "--time-limit", f"{left_s:.0f}"]))
        if codes[-1] == 130:
            break
    return max(codes)


if __name__ == "__main__":
    # SIGTERM as Ctrl-C, as in `python -m benchmarks`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
