"""Does a run that is killed end as the one that was not? Kills runs by SIGKILL at exactly named places, and starts them
again until they complete.

    python -m tests.chaos                                # 200 kills: each place at each stage
    python -m tests.chaos --kills 200 --seed 0 --only 17 # one case of them again
    python -m tests.chaos --kills 64 --seed 1 --changing # of runs whose stage changes after each step

Prints a table; exit code 1 if a run has ended otherwise than undisturbed or has left something behind, or a place was
never passed at one of the stages though it was planned there.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import hydra.core.plugins
import torch

from tests.chaos import starts
from tests.chaos.cases import Outcome, Undisturbed, carry_out
from tests.chaos.places import PLACES
from tests.chaos.plan import VICTIMS, Case, plan, quick


def main(arguments: list[str]) -> int:
    """The exit code."""
    given = _parsed(arguments)
    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()  # looks through all installed packages once
    started_s = time.monotonic()
    cases = quick() if given.quick else plan(given.kills, given.seed, changing=given.changing)
    chosen = [case for case in cases if given.only is None or case.number == given.only]
    if not chosen:
        sys.exit(f"--only: got {given.only}; it must be 0 to {len(cases) - 1}")
    shutil.rmtree(given.out, ignore_errors=True)
    with ProcessPoolExecutor(given.jobs, get_context("fork"), starts.get_ready) as pool:
        runs = {
            ranks: pool.submit(Undisturbed.run, given.out / f"undisturbed-{ranks}", ranks)
            for ranks in {case.virtual_ranks for case in chosen}
        }
        undisturbed = {ranks: run.result() for ranks, run in runs.items()}
        under_way = [
            pool.submit(carry_out, case, given.out / f"case-{case.number}", undisturbed[case.virtual_ranks])
            for case in chosen
        ]
        outcomes = []
        for each in under_way:
            outcomes.append(outcome := each.result())
            _tell(outcome, given, len(cases))
    planned = [(each.place, each.stage) for case in chosen for each in case.strikes]
    missing = sorted(set(planned) - _struck(outcomes))
    _print_table(outcomes)
    for place, stage in missing:
        print(f"never passed at stage {stage}: {place}")
    wrong = [outcome for outcome in outcomes if outcome.problems]
    num_struck = sum(outcome.num_struck for outcome in outcomes)
    num_restarts = sum(sum(outcome.restarts.values()) for outcome in outcomes)
    print(
        f"{num_struck} kills in {len(outcomes)} runs, {num_restarts} restarts, {len(wrong)} runs went wrong; "
        f"{time.monotonic() - started_s:.0f} s"
    )
    (given.out / "report.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 1 if wrong or missing else 0


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--changing", action="store_true", help="runs whose stage changes after each step, all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="eleven kills")
    parser.add_argument("--out", type=lambda name: Path(name).absolute(), default=Path("outputs/chaos").absolute())
    return parser.parse_args(arguments)


def _tell(outcome: Outcome, given: argparse.Namespace, num_cases: int) -> None:
    case = outcome.case
    folder = given.out / f"case-{case.number}"
    num_missed = len(case.strikes) - outcome.num_struck
    missed = f", of which {num_missed} never struck" if num_missed else ""
    ending = "WRONG" if outcome.problems else "ok"
    print(f"{case.number + 1}/{num_cases} {_named(case)}{missed}: {ending}", flush=True)
    if not outcome.problems:
        shutil.rmtree(folder)
        return
    for problem in outcome.problems:
        print(f"    {problem}")
    which = "--quick" if given.quick else f"--kills {given.kills} --seed {given.seed}{' --changing' * given.changing}"
    print(f"    in {folder}; again: python -m tests.chaos {which} --only {case.number}")


def _named(case: Case) -> str:
    kills = [f"{each.place} ({each.victim}, stage {each.stage}, {each.num_ranks} ranks)" for each in case.strikes]
    return "; ".join(kills)


def _struck(outcomes: list[Outcome]) -> set[tuple[str, int]]:
    """(place, stage) of each kill that has struck."""
    return {(each.place, each.stage) for outcome in outcomes for each in outcome.case.strikes[: outcome.num_struck]}


def _print_table(outcomes: list[Outcome]) -> None:
    """By place: whom the kills have struck, those whose place was never passed, restarts, runs that went wrong."""
    columns = (*VICTIMS, "missed", "restarts", "wrong")
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        for index, strike in enumerate(outcome.case.strikes):
            has_struck = index < outcome.num_struck
            counts[strike.place, strike.victim if has_struck else "missed"] += 1
            counts[strike.place, "restarts"] += outcome.restarts.get(index, 0)
            counts[strike.place, "wrong"] += bool(outcome.problems)
    width = max(len(place.name) for place in PLACES)
    print("\n" + " " * width + "".join(f"{name:>10}" for name in columns))
    for name in [*(place.name for place in PLACES), "all"]:
        places = [place.name for place in PLACES] if name == "all" else [name]
        sums = [sum(counts[place, column] for place in places) for column in columns]
        if any(sums):
            print(name.ljust(width) + "".join(f"{number or '-':>10}" for number in sums))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
