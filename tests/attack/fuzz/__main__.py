"""Is every file safe to read? Damages each of them thousands of times, by seed, and reads it as commands do.

    python -m tests.attack.fuzz --mutations 10000 --seed 0
    python -m tests.attack.fuzz --only manifest.json --seed 17 --mutations 1 # one of them again

Prints a table: a file is refused in one line, or what is read of it is what it was; "another": it says something else,
in order, and no hash can tell, since there is none or the damage has made it fit. Exit code 1 where anything was bad.
"""

import argparse
import json
import sys
import warnings

import torch

from tests.attack.fuzz.cases import OF_KINDS, TARGETS
from tests.attack.fuzz.trial import ANOTHER, BAD, REFUSED, UNCHANGED, tried


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000, help="of all files together")
    parser.add_argument(
        "--seed", type=int, default=0, help=f"of the first of each file; from {OF_KINDS} on of kinds and sizes alone"
    )
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="one file; may be given again")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = given.only or list(TARGETS)
    each = -(-given.mutations // len(names))
    print(f"{'file':40} {'damaged':>8} {'refused':>8} {'unchanged':>10} {'another':>8} {'bad':>5}")
    total, bad = 0, {}
    for name in names:
        half = -(-each // 2)
        seeds = [
            *range(given.seed, given.seed + half),
            *range(OF_KINDS + given.seed, OF_KINDS + given.seed + each - half),
        ]
        tally = tried(TARGETS[name], seeds if len(seeds) > 1 else [given.seed])
        counts = [tally.counts[kind] for kind in (REFUSED, UNCHANGED, ANOTHER, BAD)]
        total += each
        row = [each, *counts]
        print(f"{name:40} {row[0]:8} {row[1]:8} {row[2]:10} {row[3]:8} {row[4]:5}", flush=True)
        bad |= {f"{name} {seed}": what for seed, what in tally.bad.items()}
    print(f"{total} damaged files, {len(bad)} bad")
    for which, what in bad.items():
        print(json.dumps(f"{which}: {what}")[1:-1])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
