"""Files that were damaged are refused in one line, or read as they were: some of each, with fixed seeds.

`python -m tests.attack.fuzz --mutations 10000` tries more of them.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attack.fuzz.cases import OF_KINDS, TARGETS, Target
from tests.attack.fuzz.trial import tried
from zerotrain.errors import CheckpointError

NUM_OF_EACH = 18
FOUND: dict[str, tuple[int, ...]] = {
    "manifest.json": (34, 51),
    "manifest.json, its hash made to fit": (184, 253, 543, 1050030),
    "torch.save": (203,),
    "index of Hugging Face": (29, 33, 103, 1020074),
    "index of Hugging Face, by transformers": (29, 33, 34, 51, 135, 140, 151, 189),
    "index.json of a store": (151, 188, 100053, 100059, 1020016),
    "tokenizer.json": (103, 20099, 1001074),
    "job.json": (95, 133),
    ".lock": (43, 81),
    "metrics.jsonl": (33,),
    "export json": (1063,),
    "jsonl": (1001079,),
    "parquet": (10, 1050027),
    "tokens.npy": (4, 11),
    "study.db": (3000004,),
}
"""Seeds at which there was something to mend, beside the first ones."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_one_line_or_what_it_was(name: str) -> None:
    seeds = [*range(NUM_OF_EACH // 2), *range(OF_KINDS, OF_KINDS + NUM_OF_EACH // 2), *FOUND.get(name, ())]
    tally = tried(TARGETS[name], seeds)
    assert tally.bad == {}
    assert sum(tally.counts.values()) == len(seeds)


CONTENT = json.dumps({"step": 3, "name": "x" * 40})


def make(folder: Path) -> None:
    (folder / "file.json").write_text(CONTENT)


def is_damaged(folder: Path) -> bool:
    return (folder / "file.json").read_bytes() != CONTENT.encode()


def believed(folder: Path) -> Any:
    """A reader without a schema."""
    return bytearray(json.loads((folder / "file.json").read_bytes())["step"])


def colours(folder: Path) -> Any:
    if is_damaged(folder):
        raise ValueError("\x1b[31mred")


def passes_on(folder: Path) -> Any:
    if is_damaged(folder):
        raise ValueError("KeyError: 'step'")


def takes_memory(folder: Path) -> Any:
    return bytearray(2**31 if is_damaged(folder) else 0)


def ends(folder: Path) -> Any:
    return os._exit(0) if is_damaged(folder) else None


@pytest.mark.parametrize(
    ("read", "num", "signs"),
    [
        (believed, 150, ["RecursionError", "JSONDecodeError", "TypeError", "KeyError", "changed, and read"]),
        (colours, 3, ["is told as"]),
        (passes_on, 9, ["in words of Python"]),
        (takes_memory, 3, ["MemoryError"]),
        (ends, 5, ["ended the process"]),
    ],
)
def test_the_trial_sees_what_is_bad_and_goes_on(read: Callable[[Path], Any], num: int, signs: list[str]) -> None:
    refusals = (ValueError,) if read in (colours, passes_on) else (CheckpointError,)
    tally = tried(Target(make=make, file="file.json", json=True, read=read, refusals=refusals), range(num))
    assert [sign for sign in signs if sign not in " ".join(tally.bad.values())] == []
    assert sum(tally.counts.values()) == num
