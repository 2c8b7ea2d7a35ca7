"""Do the tests notice faults? Plants each fault in a copy of the tree and runs the tests that must fail.

    python -m tests.mutants                 # all, some minutes
    python -m tests.mutants zeros drop      # those whose name begins so

Prints a table; exit code 1 if a fault survived. What came of it last: docs/reference/faults.md.
"""

import argparse
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import Manager, get_context
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutants.fault import REPOSITORY
from tests.mutants.faults import FAULTS
from tests.mutants.run import Ending, run_tests
from zerotrain.testing.ranks import HANG_S

NUM_AT_ONCE = os.cpu_count() or 1
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "outputs", "build", "images")
FAILED, PASSED = 1, 0


def planted(name: str, trees: "SimpleQueue[Path]") -> tuple[str, Ending]:
    """Run the tests of a fault with it, in a tree that is free.

    Its file has another time, by which Python knows the bytecode of the sound one as not of this: a fault may have the
    size and, within a second, the time of what it replaces.
    """
    fault, tree = FAULTS[name], trees.get()
    path = tree / "zerotrain" / fault.file
    text, of_sound = path.read_text(), path.stat()
    path.write_text(fault.planted_in(text))
    os.utime(path, ns=(of_sound.st_atime_ns, of_sound.st_mtime_ns + 60 * 10**9))
    try:
        return name, run_tests(fault.tests.split(), tree)
    finally:
        path.write_text(text)
        os.utime(path, ns=(of_sound.st_atime_ns, of_sound.st_mtime_ns))
        trees.put(tree)


def sound(tests: list[str], trees: "SimpleQueue[Path]") -> Ending:
    """Run tests without any fault."""
    tree = trees.get()
    try:
        return run_tests(tests, tree, 10 * HANG_S, keeps_bytecode=True)
    finally:
        trees.put(tree)


def verdict(ending: Ending) -> str:
    """What became of a fault: "killed by ...", "hang: killed", "survived", or why it proves nothing."""
    if ending.code is None:
        return f"hang: killed after {ending.took_s:.0f} s"
    if ending.code == PASSED:
        return "SURVIVED"
    if ending.code == FAILED:
        return ending.failed.rpartition("/")[2]
    return f"process ended with {ending.code}" if ending.code < 0 else f"BROKEN: {ending.failed}"


def main(prefixes: list[str]) -> int:
    chosen = {name: each for name, each in FAULTS.items() if not prefixes or name.startswith(tuple(prefixes))}
    context = get_context("fork")
    with TemporaryDirectory() as folder, Manager() as manager, ProcessPoolExecutor(NUM_AT_ONCE, context) as pool:
        trees = manager.Queue()
        for number in range(NUM_AT_ONCE):
            tree = Path(folder) / f"tree{number}"
            shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
            trees.put(tree)
        tests = sorted({test for fault in chosen.values() for test in fault.tests.split()})
        shares = [tests[number::NUM_AT_ONCE] for number in range(min(NUM_AT_ONCE, len(tests)))]
        for ending in pool.map(sound, shares, repeat(trees)):
            if ending.code != PASSED:
                print(f"without any fault the tests do not pass: {ending.failed}")
                return 2
        print("| fault | what goes wrong | function | killed by | s |\n|---|---|---|---|---|", flush=True)
        bad = []
        for name, ending in pool.map(planted, chosen, repeat(trees)):
            fault, found = chosen[name], verdict(ending)
            bad += [name] if found.startswith(("SURVIVED", "BROKEN")) else []
            print(f"| {name} | {fault.why} | {fault.function} | {found} | {ending.took_s:.0f} |", flush=True)
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
