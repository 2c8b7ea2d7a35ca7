"""One target after another, in children with little memory: what was refused, what was read, and what was bad."""

import contextlib
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attack.fuzz.cases import Target
from tests.ranks.processes import HANG_S

MEMORY_NBYTES = 1 << 30
"""More than a child has when it begins."""
CASE_S = 15.0
"""Of CPU."""
MAX_LINE = 2200
REFUSED, UNCHANGED, ANOTHER, BAD = "refused", "unchanged", "another", "bad"


class _TooLongError(BaseException):
    """No `except Exception` of a reader is in its way."""


@dataclass
class Tally:
    """What became of the damaged files of a target."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: dict[int, str] = field(default_factory=dict)
    """Seed -> what happened."""

    def note(self, seed: int, kind: str, what: str) -> None:
        """One of them is done."""
        self.counts[kind] += 1
        if kind == BAD:
            self.bad[seed] = what


def tried(target: Target, seeds: Sequence[int]) -> Tally:
    """Damage the file of a target once for each seed, and read it."""
    tally, rest = Tally(), list(seeds)
    with tempfile.TemporaryDirectory(prefix="zerotrain_fuzz_") as scratch:
        original = Path(scratch, "original", "folder")
        original.mkdir(parents=True)
        target.make(original)
        while rest:
            done = 0
            for seed, kind, what in _of_child(target, original, rest):
                done += 1
                tally.note(seed, kind, what)
            if done < len(rest):  # a child that is ended by a case says so by its silence
                seed = rest[done]
                if seed not in tally.bad:
                    tally.note(seed, BAD, "ended the process")
                    done += 1
            rest = rest[done:]
    return tally


def _of_child(target: Target, original: Path, seeds: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reads)
        with os.fdopen(writes, "wb", buffering=0) as out:
            try:
                _limit()
                _run(target, original, seeds, out)
            finally:
                os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)
    os.waitpid(pid, 0)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(signum: int, frame: object) -> None:
    raise _TooLongError


def _run(target: Target, original: Path, seeds: Sequence[int], out: Any) -> None:
    content = (original / target.file).read_bytes()
    others = tuple((original / each).read_bytes() for each in target.others)
    folder = original.parent.parent / "damaged" / "folder"
    expected = _expected(target, original, folder, content)
    for seed in seeds:
        damaged, fits = target.damaged(content, others, seed)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        kind, what = _outcome(target, original, folder, damaged, fits, expected)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(pickle.dumps((seed, kind, what)))
        if kind == BAD and what.startswith("took longer"):
            os._exit(0)


def _expected(target: Target, original: Path, folder: Path, content: bytes) -> Any:
    """What is read of the file as it is; of one that is refused as it is, its refusal."""
    found = []
    for _ in range(2):
        try:
            found.append(_read_copy(target, original, folder, content))
        except target.refusals as error:
            found.append(error)
    assert repr(found[0]) == repr(found[1]), "it is read otherwise each time"
    return found[0]


def _read_copy(target: Target, original: Path, folder: Path, content: bytes) -> Any:
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(original, folder, copy_function=shutil.copy2)
    (folder / target.file).write_bytes(content)
    return target.read(folder)


def _outcome(
    target: Target, original: Path, folder: Path, damaged: bytes, fits: bool, expected: Any
) -> tuple[str, str]:
    began = time.process_time()
    try:
        found = _read_copy(target, original, folder, damaged)
    except target.refusals as error:
        return _of_refusal(error)
    except _TooLongError:
        return BAD, f"took longer than {HANG_S:g} s"
    except BaseException as error:
        return BAD, _told(error)
    if time.process_time() - began > CASE_S:
        return BAD, f"took {time.process_time() - began:.0f} s"
    if repr(found) == repr(expected):
        return UNCHANGED, ""
    if target.says is not None:
        try:
            same = target.says(folder) == found
        except Exception as error:
            return BAD, f"read, and the format's own library refuses it: {error}"
        return (ANOTHER, "") if same else (BAD, "read otherwise than by the format's own library")
    return (ANOTHER, "") if fits or target.is_the_word else (BAD, f"changed, and read: {_difference(found, expected)}")


def _difference(found: Any, expected: Any) -> str:
    left, right = repr(found), repr(expected)
    at = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0)
    return f"{left[max(0, at - 60) : at + 60]} for {right[max(0, at - 60) : at + 60]}"


WORDS_OF_PYTHON = ("Error:", "Traceback", "object has no attribute", "NoneType", "unexpected keyword", "list index")


def _of_refusal(error: BaseException) -> tuple[str, str]:
    said = str(error)
    if not said.strip() or any(not line.isprintable() or len(line) > MAX_LINE for line in said.splitlines()):
        return BAD, f"is told as {said[:300]!r}"
    if any(word in said for word in WORDS_OF_PYTHON):
        return BAD, f"is told in words of Python: {said[:300]}"
    return REFUSED, said[:200]


def _told(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = f"{Path(file).name}:{trace.tb_lineno}" if "/zerotrain/" in file else place
        trace = trace.tb_next
    return f"{type(error).__name__} at {place}: {str(error)[:200]}"
