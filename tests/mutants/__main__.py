"""Do the tests notice faults? Plants each fault in a copy of the tree and runs the tests that must fail.

    python -m tests.mutants                 # all, a quarter of an hour
    python -m tests.mutants zeros drain     # those whose name begins so

Prints a table; exit code 1 if a fault survived. What came of it last: docs/reference/faults.md.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.mutants.fault import REPOSITORY, Fault
from tests.mutants.faults import FAULTS

LIMIT_S = 150.0
"""A run of tests that takes longer hangs."""
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "outputs", "build", "images")
FAILED, PASSED = 1, 0


def run_tests(tree: Path, tests: list[str], *, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """(exit code of pytest, None if it hung; the first test that failed)"""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rf"]
    # Without bytecode: a fault may have the size and, within a second, the time of what it replaces.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that still wait for each other
        process.communicate()
    found = re.search(r"^FAILED tests/(\S+?)(\[.*)?( - .*)?$", output, re.MULTILINE)
    return process.returncode, found[1] if found else output[-2000:]


def verdict_on(fault: Fault, tree: Path) -> str:
    """What became of a fault: "killed by ...", "hang: killed", "survived", or why it proves nothing."""
    path = tree / "zerotrain" / fault.file
    sound = path.read_text()
    path.write_text(fault.planted_in(sound))
    try:
        code, failed = run_tests(tree, list(fault.tests))
    finally:
        path.write_text(sound)
    if code is None:
        return f"hang: killed after {LIMIT_S:.0f} s"
    if code == PASSED:
        return "SURVIVED"
    if code == FAILED:
        return failed.rpartition("/")[2]
    return f"process ended with {code}" if code < 0 else f"BROKEN: {failed}"


def main(prefixes: list[str]) -> int:
    chosen = {name: each for name, each in FAULTS.items() if not prefixes or name.startswith(tuple(prefixes))}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        tests = sorted({test for fault in chosen.values() for test in fault.tests})
        code, failed = run_tests(tree, tests, limit_s=10 * LIMIT_S)
        if code != PASSED:
            print(f"without any fault the tests do not pass: {failed}")
            return 2
        print("| fault | what goes wrong | file | killed by | s |\n|---|---|---|---|---|", flush=True)
        bad = []
        for name, fault in chosen.items():
            started_s = time.monotonic()
            verdict = verdict_on(fault, tree)
            bad += [name] if verdict.startswith(("SURVIVED", "BROKEN")) else []
            print(
                f"| {name} | {fault.why} | {fault.file} | {verdict} | {time.monotonic() - started_s:.0f} |", flush=True
            )
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
