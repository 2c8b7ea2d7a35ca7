"""Does a run that is ended while it starts leave nothing behind? Sends signals at random moments of a start, from the
first millisecond until the ranks train, to the launcher, to its fork server or to a rank; then starts it again.

    python -m tests.chaos.starting                  # 100 of them
    python -m tests.chaos.starting --kills 8 --seed 1

Exit code 1 if a process or a file is left, a start says something else than how it was ended, or the run that is
started again in the same folder does not complete with the weights of the undisturbed one.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.cases import SETTINGS
from tests.distributed.commands import Command, by_hand, result_of
from tests.ranks.processes import HANG_S

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
VICTIMS = ("launcher", "group", "newest")
"""The launcher alone; its process group, as from a terminal; its newest child or grandchild, if there is one."""

BEFORE_OURS = "Fatal Python error: init_import_site"
"""Python's own words at a Ctrl-C before it has come to the first line of launch.py."""


@dataclass(frozen=True)
class Blow:
    """One signal."""

    signum: signal.Signals
    victim: str
    after: float
    """Of the time that a start takes until its ranks train, the part after which it comes."""


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.starting", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="starts at a time")
    parser.add_argument(
        "--out", type=lambda name: Path(name).absolute(), default=Path("outputs/chaos-start").absolute()
    )
    given = parser.parse_args(arguments)
    out = given.out.absolute()
    draw = random.Random(given.seed)
    blows = [Blow(draw.choice(SIGNALS), draw.choice(VICTIMS), draw.random()) for _ in range(given.kills)]
    shutil.rmtree(out, ignore_errors=True)
    weights, takes_s = undisturbed(out / "undisturbed")
    with ProcessPoolExecutor(given.jobs) as pool:
        under_way = [
            pool.submit(strike, out / str(number), blow, weights, takes_s) for number, blow in enumerate(blows)
        ]
        found = [each.result() for each in under_way]
    wrong = [(blow, problems) for blow, problems in zip(blows, found, strict=True) if problems]
    for blow, problems in wrong:
        print(f"{blow}: {'; '.join(problems)}")
    print(f"{len(blows)} kills within a start of {takes_s:.1f} s, {len(wrong)} wrong")
    return 1 if wrong else 0


def undisturbed(folder: Path) -> tuple[str, float]:
    """The weights of the run, and the seconds that its ranks take until they train."""
    command, began_s = _start(folder), time.monotonic()
    while not _is_at_work(folder):
        assert command.process.poll() is None, command.stderr
        time.sleep(0.01)
    takes_s = time.monotonic() - began_s
    assert command.wait() == 0, command.stderr
    return _weights(folder), takes_s


def strike(folder: Path, blow: Blow, weights: str, takes_s: float) -> list[str]:
    """What is wrong after a blow, and after the start that follows it."""
    command = _start(folder)
    process = command.process
    deadline = time.monotonic() + blow.after * takes_s
    while time.monotonic() < deadline and not _is_at_work(folder) and process.poll() is None:
        time.sleep(0.001)
    with suppress(psutil.Error, ProcessLookupError):
        if blow.victim == "group":
            os.killpg(process.pid, blow.signum)
        else:
            children = psutil.Process(process.pid).children(recursive=True)
            victim = children[-1].pid if blow.victim == "newest" and children else process.pid
            os.kill(victim, blow.signum)
    try:
        code = command.wait()
    except subprocess.TimeoutExpired:
        return [f"hangs: {command.stderr}"]
    problems = _left(folder, command)
    if "Traceback" in command.stderr and BEFORE_OURS not in command.stderr:
        problems.append(f"a traceback: {command.stderr}")
    if code not in (0, 1, *(each for signum in SIGNALS for each in (-signum, 128 + signum))):
        problems.append(f"exit code {code}: {command.stderr}")
    again = _start(folder)
    if again.wait() != 0:
        return [*problems, f"the next start: {again.stderr}"]
    if _weights(folder) != weights:
        problems.append("other weights")
    problems += _left(folder, again)
    if not problems:
        shutil.rmtree(folder)
    return problems


def _start(folder: Path) -> Command:
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    more = ("launch.nproc_per_node=2", "train.max_steps=2", "checkpoint.every=null", "checkpoint.save_at_end=false")
    settings = [each for each in SETTINGS if not each.startswith("checkpoint.every")]
    return by_hand(*settings, *more, folder=folder, TMPDIR=str(folder / "tmp"))


def _is_at_work(folder: Path) -> bool:
    return (folder / "run/metrics.jsonl").exists()


def _weights(folder: Path) -> str:
    return str(result_of(folder / "run")["weights_sha256"])


def _left(folder: Path, command: Command) -> list[str]:
    """Processes and temporary files that are there long after the end."""
    processes = command.wait_until_gone()
    deadline = time.monotonic() + HANG_S
    while (files := os.listdir(folder / "tmp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"left: {len(processes)} processes, {files}"] if processes or files else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
