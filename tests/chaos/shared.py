"""What do ranks that share their memory leave when one is killed, and what are the others told? Kills runs by SIGKILL
at places of the meeting, of the memory, of collectives and of the courier's thread, and at any moment.

    python -m tests.chaos.shared                          # 50 kills
    python -m tests.chaos.shared --kills 50 --seed 0 --only 17 # one of them again

Prints a line for each; exit code 1 if one has ended otherwise than it should, or its place was never passed.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import hydra.core.plugins
import torch

from tests.chaos import starts
from tests.chaos.cases import SETTINGS
from tests.chaos.shared_places import BUILDING, COLLECTIVES, MEETING, MOMENT, OF_THE_RUN, STEP
from tests.chaos.strike import LAUNCHER, Strike, forget_processes, plan_strikes, struck_in
from zerotrain.testing.limits import HANG_S

STAGES = (0, 1, 2, 3)
VICTIMS = ("itself", "itself", "another", "itself", "parent")
"""In turn: so often each."""
MAX_STEPS = 4
MANY_STEPS = 10**6
"""Of a run that is killed at some moment: it does not end before."""
MOMENTS_MS = 1500
SHARE_OF_MOMENTS = 0.24
ENDS = "courier: has ended, and not given back"
ONCE = (*MEETING, *BUILDING, ENDS)
"""Places that are passed outside of steps."""


@dataclass
class Outcome:
    """What came of a kill."""

    number: int
    strike: Strike
    has_struck: bool = False
    seconds: float = 0.0
    """From the kill to the end."""
    problems: list[str] = field(default_factory=list)


def plan(num_kills: int, seed: int) -> list[Strike]:
    """Each place in turn, and moments between; each at another stage than the time before."""
    drawn = random.Random(seed)
    places = [*MEETING, *BUILDING, *COLLECTIVES, *STEP]
    num_moments = round(SHARE_OF_MOMENTS * num_kills)
    named = [places[index % len(places)] for index in range(num_kills - num_moments)]
    first = {place: drawn.randrange(len(STAGES)) for place in [*places, MOMENT]}
    strikes = []
    for index, place in enumerate([*named, *[MOMENT] * num_moments]):
        num_ranks = drawn.choice([2, 3])
        turn, first[place] = first[place], first[place] + 1
        strikes.append(
            Strike(
                place=place,
                victim=VICTIMS[index % len(VICTIMS)],
                rank=drawn.randrange(num_ranks),
                step=0 if place in ONCE or place == MOMENT else drawn.randint(1, MAX_STEPS - 1),
                passing=_passing_of(place, num_ranks, drawn),
                stage=STAGES[turn % len(STAGES)],
                num_ranks=num_ranks,
            )
        )
    return strikes


def _passing_of(place: str, num_ranks: int, drawn: random.Random) -> int:
    if place == MOMENT:
        return drawn.randint(1, MOMENTS_MS)
    if place in BUILDING:
        return drawn.randint(1, 7)  # buckets
    if place in ONCE:
        return drawn.randint(1, num_ranks - 1) if "memory" in place else 1
    return drawn.randint(1, 4)


def carry_out(number: int, strike: Strike, folder: Path) -> Outcome:
    """Start a run in a folder of its own, and look at what is left when it has ended."""
    outcome = Outcome(number, strike)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    (folder / OF_THE_RUN).mkdir()
    plan_strikes(folder, [strike])
    forget_processes(folder)
    try:
        code = starts.start(_arguments(strike), folder, out=folder / "start", plain=False)
        outcome.problems += _problems_of_ending(strike, folder, code)
    except AssertionError as error:
        outcome.problems.append(str(error))
    struck = struck_in(folder)
    outcome.has_struck = bool(struck)
    if struck:
        outcome.seconds = time.time() - struck[0].stat().st_mtime
    outcome.problems += left_of(folder, by_launcher=victim_of(strike) != LAUNCHER)
    return outcome


def _arguments(strike: Strike) -> list[str]:
    own = (
        "zero.bucket_mb=0.01",
        "checkpoint.every=null",
        "checkpoint.save_at_end=false",
        "checkpoint.resume=null",
        "train.eval_every=0",
        f"launch.timeout_s={10 * HANG_S}",  # nothing may wait for that: it would hang
        f"train.max_steps={MANY_STEPS if strike.place == MOMENT else MAX_STEPS}",
        f"zero.stage={strike.stage}",
        f"launch.nproc_per_node={strike.num_ranks}",
    )
    given = {each.partition("=")[0] for each in own}
    return [*(each for each in SETTINGS if each.partition("=")[0] not in given), *own]


def victim_of(strike: Strike) -> int:
    """The rank that is killed, or the launcher."""
    if strike.victim == "another":
        return next(rank for rank in range(strike.num_ranks) if rank != strike.rank)
    return strike.rank if strike.victim == "itself" else LAUNCHER


def _problems_of_ending(strike: Strike, folder: Path, code: int) -> list[str]:
    said = Path(folder / "start.err").read_text(errors="replace")
    if victim_of(strike) == LAUNCHER:
        return [] if code == -9 else [f"exit code {code}"]
    cause = f"rank {victim_of(strike)} was killed by SIGKILL"
    problems = [] if code == 1 else [f"exit code {code}"]
    if not said.startswith(cause) or "Traceback" in said:
        problems.append(f"it says: {said.strip()}")
    result = folder / "run" / "result.json"
    error = json.loads(result.read_text())["error"] if result.exists() else None
    if not (error or "").startswith(cause):
        problems.append(f"result.json says: {error}")
    return problems


def left_of(folder: Path, *, by_launcher: bool) -> list[str]:
    """What there still is of a run's memory, of where its ranks met, and in the folders of temporary files.

    Args:
        by_launcher: it has lived to remove its folder of a few kB, in which ranks and launcher meet.
    """
    noted = {path.name for path in (folder / OF_THE_RUN).iterdir()}
    inodes = {int(name.removeprefix("inode-")) for name in noted if name.startswith("inode-")}
    sockets = [name for name in noted if name in Path("/proc/net/unix").read_text()]
    processes = {path.read_text() for path in folder.glob("process-*")}
    temporary = [name for name in os.listdir(folder / "tmp") if by_launcher or not name.startswith("zerotrain_")]
    in_dev_shm = [name for name in os.listdir("/dev/shm") if processes & set(name.split("_"))]
    left = {
        "memory, held by process": holders_of(inodes),
        "addresses": sockets,
        "in /dev/shm": in_dev_shm,
        "in $TMPDIR": temporary,
    }
    return [f"left behind, {what}: {found}" for what, found in left.items() if found]


def holders_of(inodes: set[int]) -> list[int]:
    """Processes that have a descriptor or a mapping of the memory of ranks, by the inodes of its files."""
    found = []
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            opened = [f"/proc/{process}/fd/{each}" for each in os.listdir(f"/proc/{process}/fd")]
            held = {os.stat(path).st_ino for path in opened if os.readlink(path).startswith("/memfd:zerotrain")}
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:  # gone since it was listed, or another user's
            continue
        held |= {int(line.split()[4]) for line in lines if "/memfd:zerotrain" in line}
        found += [process] if held & inodes else []
    return found


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.shared", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of some kills")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--out", type=lambda name: Path(name).absolute(), default=Path("outputs/shared").absolute())
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hydra.core.plugins.Plugins.instance()  # looks through all installed packages once
    started_s = time.monotonic()
    strikes = [each for each in enumerate(plan(given.kills, given.seed)) if not given.only or each[0] in given.only]
    given.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.jobs, get_context("fork"), starts.get_ready) as pool:
        under_way = [pool.submit(carry_out, *each, given.out / f"kill-{each[0]}") for each in strikes]
        outcomes = []
        for each in under_way:
            outcomes.append(each.result())
            _tell(outcomes[-1], given.out)
    wrong = [each for each in outcomes if each.problems or not each.has_struck]
    longest_s = max(each.seconds for each in outcomes)
    print(
        f"{sum(each.has_struck for each in outcomes)} kills, {len(wrong)} went wrong; from a kill to the end at most "
        f"{longest_s:.1f} s; {time.monotonic() - started_s:.0f} s"
    )
    (given.out / "report.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return 1 if wrong else 0


def _tell(outcome: Outcome, out: Path) -> None:
    strike = outcome.strike
    when = f"{strike.passing} ms after joining" if strike.place == MOMENT else f"step {strike.step}"
    ending = "WRONG" if outcome.problems else f"ok, {outcome.seconds:.1f} s" if outcome.has_struck else "never struck"
    print(
        f"{outcome.number}: {strike.place} ({when}; {strike.victim}, rank {strike.rank} of {strike.num_ranks}, "
        f"stage {strike.stage}): {ending}",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"    {problem}")
    if not outcome.problems and outcome.has_struck:
        shutil.rmtree(out / f"kill-{outcome.number}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
