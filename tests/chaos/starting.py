"""Does a run that is ended while it starts leave nothing behind? Sends signals at random moments of a start, from the
first millisecond until the ranks train, to the launcher, to its fork server or to a rank; then starts it again.

    python -m tests.chaos.starting                  # 100 of them
    python -m tests.chaos.starting --kills 8 --seed 1

Exit code 1 if a process or a file is left, a start says something else than how it was ended, or the run that is
started again in the same folder does not complete with the weights of the undisturbed one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.cases import SETTINGS
from tests.zygote.server import REPOSITORY
from zerotrain.testing.limits import HANG_S

MARK = "ZEROTRAIN_CHAOS_START"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
VICTIMS = ("launcher", "group", "newest")
"""The launcher alone; its process group, as from a terminal; its newest child or grandchild, if there is one."""


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
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda each: strike(out / str(each[0]), each[1], weights, takes_s), enumerate(blows)))
    wrong = [(blow, problems) for blow, problems in zip(blows, found, strict=True) if problems]
    for blow, problems in wrong:
        print(f"{blow}: {'; '.join(problems)}")
    print(f"{len(blows)} kills within a start of {takes_s:.1f} s, {len(wrong)} wrong")
    return 1 if wrong else 0


def undisturbed(folder: Path) -> tuple[str, float]:
    """The weights of the run, and the seconds that its ranks take until they train."""
    process, began_s = _start(folder), time.monotonic()
    while not _is_at_work(folder):
        assert process.poll() is None, _said(folder)
        time.sleep(0.01)
    takes_s = time.monotonic() - began_s
    assert process.wait(HANG_S) == 0, _said(folder)
    return _weights(folder), takes_s


def strike(folder: Path, blow: Blow, weights: str, takes_s: float) -> list[str]:
    """What is wrong after a blow, and after the start that follows it."""
    process = _start(folder)
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
        code = process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return [f"hangs: {_said(folder)}"]
    problems = _left(folder, process)
    said = _said(folder)
    if "Traceback" in said:
        problems.append(f"a traceback: {said}")
    if code not in (0, 1, *(each for signum in SIGNALS for each in (-signum, 128 + signum))):
        problems.append(f"exit code {code}: {said}")
    again = _start(folder)
    if again.wait(HANG_S) != 0:
        return [*problems, f"the next start: {_said(folder)}"]
    if _weights(folder) != weights:
        problems.append("other weights")
    problems += _left(folder, again)
    if not problems:
        shutil.rmtree(folder)
    return problems


def _start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), MARK: str(folder)}
    more = ("launch.nproc_per_node=2", "train.max_steps=2", "checkpoint.every=null", "checkpoint.save_at_end=false")
    settings = [each for each in SETTINGS if not each.startswith("checkpoint.every")]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return subprocess.Popen(
            [sys.executable, str(REPOSITORY / "launch.py"), *settings, *more],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _is_at_work(folder: Path) -> bool:
    return (folder / "run/metrics.jsonl").exists()


def _said(folder: Path) -> str:
    return (folder / "err").read_text(errors="replace")[-2000:]


def _weights(folder: Path) -> str:
    return str(json.loads((folder / "run/result.json").read_text())["weights_sha256"])


def _left(folder: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """Processes and temporary files that are there a while after the end."""
    deadline = time.monotonic() + HANG_S
    while True:
        processes = [each.pid for each in psutil.process_iter() if _is_of(each, folder) and each.pid != process.pid]
        files = os.listdir(folder / "tmp")
        if not processes and not files:
            return []
        if time.monotonic() > deadline:
            return [f"left: {len(processes)} processes, {files}"]
        time.sleep(0.05)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone since it was listed
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
