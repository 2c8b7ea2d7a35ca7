"""Do the tests notice faults? Plants each fault in a copy of the tree and runs the tests that must fail.

    python -m tests.mutants                 # all, some minutes
    python -m tests.mutants zeros drop      # those whose name begins so

Prints a table; exit code 1 if a fault survived. What came of it last: docs/reference/faults.md.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutants.fault import REPOSITORY
from tests.mutants.faults import FAULTS
from tests.ranks.processes import HANG_S

NUM_AT_ONCE = os.cpu_count() or 1
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "outputs", "build", "images")
PYTEST = ("-m", "pytest", "-x", "--slow", "-p", "no:cacheprovider", "--tb=no", "-rfE")
PLANTED_S = 300.0
"""Until a planted fault counts as one that hangs: its tests take seconds, or a minute beside much else."""
FAILED, PASSED = 1, 0


@dataclass(frozen=True)
class Ending:
    """What came of a run of pytest."""

    code: int | None
    """None if it hung."""
    failed: str
    """The first test that failed, or the end of the output."""
    took_s: float

    @property
    def verdict(self) -> str:
        """What became of a fault: the test that failed, "hang: killed", "SURVIVED", or why it proves nothing."""
        if self.code is None:
            return f"hang: killed after {self.took_s:.0f} s"
        if self.code == PASSED:
            return "SURVIVED"
        if self.code == FAILED:
            return self.failed.rpartition("/")[2]
        return f"process ended with {self.code}" if self.code < 0 else f"BROKEN: {self.failed}"


def run_tests(tests: list[str], tree: Path, limit_s: float, **environment: str) -> Ending:
    """Run tests of a tree, named within tests/, up to the first that fails."""
    started_s, code = time.monotonic(), None
    with tree.with_suffix(".out").open("w+", errors="replace") as file:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *(f"tests/{test}" for test in tests)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)} | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that still wait for each other
        process.wait()
        file.seek(0)
        output = file.read()
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(\[.*)?( - .*)?$", output, re.MULTILINE)
    return Ending(code, found[1] if found else output[-2000:], time.monotonic() - started_s)


def main(prefixes: list[str]) -> int:
    """The exit code."""
    chosen = {name: each for name, each in FAULTS.items() if not prefixes or name.startswith(tuple(prefixes))}
    trees = SimpleQueue[Path]()

    def sound(tests: list[str]) -> Ending:
        tree = trees.get()
        ending = run_tests(tests, tree, 10 * HANG_S)
        trees.put(tree)
        return ending

    def planted(name: str) -> Ending:
        """Its file is younger than the bytecode of the sound one, which stays as it is."""
        fault = chosen[name]
        text = (REPOSITORY / "zerotrain" / fault.file).read_text()
        changed, tree = fault.planted_in(text), trees.get()
        path = tree / "zerotrain" / fault.file
        path.write_text(changed)
        ending = run_tests(fault.tests.split(), tree, PLANTED_S, PYTHONDONTWRITEBYTECODE="1")
        path.write_text(text)
        trees.put(tree)
        return ending

    with TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for number in range(NUM_AT_ONCE):
            tree = Path(folder) / f"tree{number}"
            shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
            trees.put(tree)
        tests = sorted({test for fault in chosen.values() for test in fault.tests.split()})
        shares = [tests[number::NUM_AT_ONCE] for number in range(min(NUM_AT_ONCE, len(tests)))]
        for ending in pool.map(sound, shares):
            if ending.code != PASSED:
                print(f"without any fault the tests do not pass: {ending.failed}")
                return 2
        print("| fault | what goes wrong | function | killed by | s |\n|---|---|---|---|---|", flush=True)
        bad = []
        for (name, fault), ending in zip(chosen.items(), pool.map(planted, chosen), strict=True):
            bad += [name] if ending.verdict.startswith(("SURVIVED", "BROKEN")) else []
            row = (name, fault.why, fault.function, ending.verdict, f"{ending.took_s:.0f}")
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{len(chosen)} faults, {len(chosen) - len(bad)} killed; not killed: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def _prefixes() -> list[str]:
    parser = argparse.ArgumentParser("python -m tests.mutants", description="Do the tests notice faults?")
    parser.add_argument("prefixes", nargs="*", help="plant those whose name begins so; default: all")
    prefixes: list[str] = parser.parse_args().prefixes
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in FAULTS):
            parser.error(f"no fault begins with {prefix}")
    return prefixes


if __name__ == "__main__":
    sys.exit(main(_prefixes()))
