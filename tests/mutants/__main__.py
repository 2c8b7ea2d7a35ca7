"""Do the tests notice faults? Plants each fault in a copy of the tree and runs the tests that must fail.

    python -m tests.mutants                 # all, some minutes
    python -m tests.mutants zeros drop      # those whose name begins so

Prints a table; exit code 1 if a fault survived. What came of it last: docs/reference/faults.md.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.mutants.fault import REPOSITORY, Fault
from tests.mutants.faults import FAULTS
from tests.mutants.run import Ending, Tests, endings
from zerotrain.testing.ranks import HANG_S

NUM_AT_ONCE = os.cpu_count() or 1
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "outputs", "build", "images")
FAILED, PASSED = 1, 0


def plant(fault: Fault, tree: Path) -> Callable[[], None]:
    """Plant a fault; what is returned takes it away.

    Its file has another time, by which Python knows the bytecode of the sound one as not of this: a fault may have the
    size and, within a second, the time of what it replaces.
    """
    path = tree / "zerotrain" / fault.file
    sound, of_sound = path.read_text(), path.stat()

    def write(text: str, later_s: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(of_sound.st_atime_ns, of_sound.st_mtime_ns + later_s * 10**9))

    write(fault.planted_in(sound), 60)
    return partial(write, sound, 0)


def verdict(ending: Ending) -> str:
    """What became of a fault: "killed by ...", "hang: killed", "survived", or why it proves nothing."""
    if ending.code is None:
        return f"hang: killed after {ending.took_s:.0f} s"
    if ending.code == PASSED:
        return "SURVIVED"
    if ending.code == FAILED:
        return ending.failed.rpartition("/")[2]
    return f"process ended with {ending.code}" if ending.code < 0 else f"BROKEN: {ending.failed}"


def sound(tests: list[str]) -> Tests:
    return Tests(
        "without any fault", tests, prepare=lambda tree: lambda: None, keeps_bytecode=True, limit_s=10 * HANG_S
    )


def main(prefixes: list[str]) -> int:
    chosen = {name: each for name, each in FAULTS.items() if not prefixes or name.startswith(tuple(prefixes))}
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / f"tree{number}" for number in range(NUM_AT_ONCE)]
        for tree in trees:
            shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        tests = sorted({test for fault in chosen.values() for test in fault.tests})
        shares = [tests[number::NUM_AT_ONCE] for number in range(NUM_AT_ONCE)]
        for ending in endings([sound(share) for share in shares if share], trees):
            if ending.code != PASSED:
                print(f"without any fault the tests do not pass: {ending.failed}")
                return 2
        print("| fault | what goes wrong | function | killed by | s |\n|---|---|---|---|---|", flush=True)
        bad = []
        planted = [Tests(name, list(fault.tests), partial(plant, fault)) for name, fault in chosen.items()]
        for ending in endings(planted, trees):
            fault, found = chosen[ending.name], verdict(ending)
            bad += [ending.name] if found.startswith(("SURVIVED", "BROKEN")) else []
            print(f"| {ending.name} | {fault.why} | {fault.function} | {found} | {ending.took_s:.0f} |", flush=True)
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
